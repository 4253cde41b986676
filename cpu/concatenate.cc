// Concatenation and splitting on the host.
//
// The pieces of all destinations, one after the other, form a line of bytes; every row has such a
// line. A thread takes a block of whole lines, or a segment of one line if a line is long. A block
// is copied piece by piece: the rows of a piece are a column, copied with loads and stores of fixed
// sizes up to 256 bytes. A block is small enough for the cache to collect the columns into rows.
// If the caches do not hold the result, stores of wide pieces bypass them, unless its memory is
// new. kMany and more equal narrow pieces are copied row by row instead.
#include "cpu/concatenate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jaxops::concatenate::cpu {
namespace {

constexpr int64_t kTaskBytes = 256 * 1024;    // of a task of one thread
constexpr int64_t kThreadsBytes = 2 << 20;    // at least, for which other threads are woken
constexpr int64_t kPieceBytes = 32;           // that take as long to copy as starting a piece
constexpr int64_t kUncachedBytes = 32 << 20;  // of which a cache keeps little for the reader
constexpr int64_t kBlockBytes = 16 * 1024;    // of the L1 cache, which has to hold twice as many
constexpr int64_t kBlockRows = 128;           // at least, which repay starting a piece

constexpr int64_t kLine = 64;           // bytes of a line of the caches
constexpr int64_t kMinPastCache = 256;  // bytes of a piece, most of whose lines are its own

constexpr int64_t kNarrow = 64;     // bytes of a piece that is not worth a column of its own
constexpr int64_t kMany = 32;       // such pieces, whose columns the caches would fetch one by one
constexpr int64_t kMaxAlike = 512;  // pieces at most that are copied row by row at a time

constexpr int64_t kMaxZeros = 256;
constexpr char kZeros[kMaxZeros] = {};

// A piece at its address in a destination.
struct Segment {
  const Piece* piece;
  const Destination* destination;
  char* out;  // address of row 0
  int64_t row_bytes;
  int64_t begin;  // offset in the line
  // The number of consecutive segments from this one on that have narrow pieces of the same size
  // and strides. It is 0 if this piece is not narrow, or if sources broadcast.
  int64_t alike = 0;

  int64_t end() const { return begin + piece->extent; }
};

std::vector<Segment> MakeLine(const Job& job) {
  std::vector<Segment> line;
  line.reserve(job.pieces.size());
  int64_t begin = 0;
  for (const Destination& destination : job.destinations) {
    auto* out = static_cast<char*>(destination.data);
    for (int64_t p = 0; p < destination.piece_count; ++p) {
      const Piece& piece = job.pieces[destination.first_piece + p];
      if (piece.extent == 0) continue;
      line.push_back({&piece, &destination, out, destination.row_bytes, begin});
      out += piece.extent;
      begin += piece.extent;
    }
  }
  if (job.broadcasts) return line;
  for (size_t s = line.size(); s-- > 0;) {
    if (line[s].piece->size == 0 || line[s].piece->size > kNarrow) continue;
    const bool is_like_next = s + 1 < line.size() && line[s + 1].alike > 0 &&
                              line[s].piece->size == line[s + 1].piece->size &&
                              line[s].piece->stride == line[s + 1].piece->stride &&
                              line[s].row_bytes == line[s + 1].row_bytes;
    line[s].alike = is_like_next ? line[s + 1].alike + 1 : 1;
  }
  return line;
}

// Returns the row of a source that belongs to a row of the destinations.
int64_t SourceRow(const Job& job, const Piece& piece, int64_t row) {
  if (!job.broadcasts) return row;
  int64_t source = 0;
  int64_t stride = 1;
  for (int d = job.row_dims - 1; d >= 0; --d) {
    const int64_t index = row % job.row_sizes[d];
    row /= job.row_sizes[d];
    if (piece.varies >> d & 1) {
      source += index * stride;
      stride *= job.row_sizes[d];
    }
  }
  return source;
}

// --- stores past the caches ----------------------------------------------------------------------

// Copies with stores that bypass the caches: a cached store would first read its line from memory.
// FenceStores must follow before another thread may read the copy.
void CopyPastCache(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
  const auto misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLine);
  const int64_t head = std::min(bytes, (kLine - misalignment) % kLine);
  std::memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= kLine; bytes -= kLine, to += kLine, from += kLine) {
    const auto* words = reinterpret_cast<const __m128i*>(from);
    const __m128i a = _mm_loadu_si128(words), b = _mm_loadu_si128(words + 1);
    const __m128i c = _mm_loadu_si128(words + 2), d = _mm_loadu_si128(words + 3);
    auto* line = reinterpret_cast<__m128i*>(to);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
  }
#endif
  std::memcpy(to, from, bytes);
}

// Returns whether memory is more than reserved. The system clears a page at the first store to it,
// which leaves the page in the caches: stores past them would then write it to memory twice. A call
// that fails, as under a filter of system calls, says that it is new.
bool IsResident(const char* address) {
#if defined(__linux__)
  static const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto page = reinterpret_cast<uintptr_t>(address) / page_bytes * page_bytes;
  unsigned char state = 0;
  return mincore(reinterpret_cast<void*>(page), 1, &state) == 0 && (state & 1) != 0;
#else
  return false;
#endif
}

void FenceStores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// --- columns -------------------------------------------------------------------------------------

// Rows of `size` bytes each, `from_stride` and `to_stride` apart.
struct Column {
  char* to;
  const char* from;
  int64_t to_stride;
  int64_t from_stride;
  int64_t size;
  int64_t rows;
};

// Calls f with a function that copies exactly kWord bytes.
template <int kWord, typename F>
void WithWord(F f) {
  f([](char* to, const char* from) { std::memcpy(to, from, kWord); });
}

// Calls f with a function that copies between kWords and 2 * kWords items of kWord bytes: kWords
// from the front and kWords from the back, which may overlap. All loads precede the first store.
template <int kWord, int kWords, typename F>
void WithEnds(int64_t size, F f) {
  f([back = size - kWords * kWord](char* to, const char* from) {
    char front_words[kWords][kWord], back_words[kWords][kWord];
    for (int w = 0; w < kWords; ++w) {
      std::memcpy(front_words[w], from + w * kWord, kWord);
      std::memcpy(back_words[w], from + back + w * kWord, kWord);
    }
    for (int w = 0; w < kWords; ++w) {
      std::memcpy(to + w * kWord, front_words[w], kWord);
      std::memcpy(to + back + w * kWord, back_words[w], kWord);
    }
  });
}

// Calls f with a function that copies `size` bytes, which is at least 1.
template <typename F>
void WithCopy(int64_t size, F f) {
  switch (size) {
    case 1:
      return WithWord<1>(f);
    case 2:
      return WithWord<2>(f);
    case 4:
      return WithWord<4>(f);
    case 8:
      return WithWord<8>(f);
    case 16:
      return WithWord<16>(f);
  }
  if (size < 4) return WithEnds<2, 1>(size, f);
  if (size < 8) return WithEnds<4, 1>(size, f);
  if (size < 16) return WithEnds<8, 1>(size, f);
  if (size <= 32) return WithEnds<16, 1>(size, f);
  if (size <= 64) return WithEnds<16, 2>(size, f);
  if (size <= 128) return WithEnds<16, 4>(size, f);
  if (size <= 256) return WithEnds<16, 8>(size, f);
  f([size](char* to, const char* from) { std::memcpy(to, from, size); });
}

void CopyColumn(const Column& c, bool past_cache = false) {
  if (c.size == 0) return;
  if (past_cache) {
    for (int64_t row = 0; row < c.rows; ++row) {
      CopyPastCache(c.to + row * c.to_stride, c.from + row * c.from_stride, c.size);
    }
    return;
  }
  // The copy is by value: a store through a char* might change the referent of a reference.
  WithCopy(c.size, [c](auto copy) {
    for (int64_t row = 0; row < c.rows; ++row) {
      copy(c.to + row * c.to_stride, c.from + row * c.from_stride);
    }
  });
}

// Zeros the padding of a piece in the rows [first, last).
void PadRows(const Segment& segment, int64_t first, int64_t last) {
  const Piece& piece = *segment.piece;
  const int64_t padding = piece.extent - piece.size;
  char* to = segment.out + piece.size + first * segment.row_bytes;
  if (padding <= kMaxZeros) {
    CopyColumn({to, kZeros, segment.row_bytes, 0, padding, last - first});
  } else {
    for (; first < last; ++first, to += segment.row_bytes) std::memset(to, 0, padding);
  }
}

// Returns whether the rows of a piece are stored past the caches at a gain: most lines that they
// touch are then their own.
bool HasOwnLines(const Segment& segment) {
  const int64_t size = segment.piece->size;
  const auto out = static_cast<int64_t>(reinterpret_cast<uintptr_t>(segment.out));
  return size >= kMinPastCache || (out | segment.row_bytes | size) % kLine == 0;
}

// Copies a piece of the rows [first, last), and its padding.
void CopyRows(const Job& job, const Segment& segment, int64_t first, int64_t last,
              bool past_cache) {
  const Piece& piece = *segment.piece;
  past_cache = past_cache && HasOwnLines(segment);
  PadRows(segment, first, last);
  // Along the last row dimension, the rows of a source are neighbours or all the same.
  const int d = job.row_dims - 1;
  const int64_t run = job.broadcasts ? job.row_sizes[d] : job.rows;
  const int64_t from_stride = job.broadcasts && !(piece.varies >> d & 1) ? 0 : piece.stride;
  while (first < last) {
    const int64_t end = std::min(last, (first / run + 1) * run);
    const auto* from = static_cast<const char*>(piece.source);
    if (piece.size > 0) from += SourceRow(job, piece, first) * piece.stride;
    CopyColumn({segment.out + first * segment.row_bytes, from, segment.row_bytes, from_stride,
                piece.size, end - first},
               past_cache);
    first = end;
  }
}

// Copies at most kMaxAlike segments that are alike: a row of all of them before the next row. The
// accesses go to `count` addresses, so that one fetch of the caches overlaps with others.
void CopyRowByRow(const Segment* segments, int64_t count, int64_t first, int64_t last) {
  struct {
    char* to;
    const char* from;
  } places[kMaxAlike];
  const int64_t to_stride = segments->row_bytes;
  const int64_t from_stride = segments->piece->stride;
  for (int64_t i = 0; i < count; ++i) {
    PadRows(segments[i], first, last);
    places[i].to = segments[i].out + first * to_stride;
    places[i].from = static_cast<const char*>(segments[i].piece->source) + first * from_stride;
  }
  WithCopy(segments->piece->size, [=, &places](auto copy) {
    for (int64_t row = 0; row < last - first; ++row) {
      for (int64_t i = 0; i < count; ++i) {
        copy(places[i].to + row * to_stride, places[i].from + row * from_stride);
      }
    }
  });
}

void CopySegments(const Job& job, const Segment* segments, int64_t count, int64_t first,
                  int64_t last, bool past_cache) {
  for (int64_t s = 0; s < count;) {
    const int64_t alike = std::min({segments[s].alike, count - s, kMaxAlike});
    if (alike >= kMany) {
      CopyRowByRow(segments + s, alike, first, last);
      s += alike;
    } else {
      CopyRows(job, segments[s++], first, last, past_cache);
    }
  }
}

// --- interleaved rows ----------------------------------------------------------------------------

constexpr int kLanes = 16;
constexpr uint8_t kNoByte = 0x80;            // a lane that stays zero
constexpr int64_t kMaxPatternBytes = 512;    // at most, which are matched to loads one by one
constexpr int64_t kMinWovenBytes = 1 << 16;  // at least, which repay the pattern

// 16 bytes of a source; some of them belong into a vector of the destination.
struct Load {
  const char* from;      // address in the first period
  int64_t stride;        // between periods
  uint8_t lane[kLanes];  // for each lane of the vector, its byte in the load
};

// The loads that form rows of narrow pieces, vector by vector. They repeat after a period: the
// least number of rows whose bytes are a whole number of vectors.
struct Pattern {
  int64_t rows = 1;
  int64_t bytes;
  int64_t periods = 0;  // that read nothing beyond the sources; 0 if columns are cheaper
  std::vector<Load> loads;
  std::vector<size_t> ends;  // index after the loads of each vector
};

// Returns the pattern of the `count` segments of one destination.
Pattern MakePattern(const Job& job, const Segment* segments, int64_t count) {
  Pattern pattern;
  while (pattern.rows * segments->row_bytes % kLanes != 0) pattern.rows *= 2;
  pattern.bytes = pattern.rows * segments->row_bytes;
#if defined(__x86_64__)
  if (job.broadcasts || pattern.bytes > kMaxPatternBytes ||
      job.rows * segments->row_bytes < kMinWovenBytes || !__builtin_cpu_supports("ssse3")) {
    return pattern;
  }
  pattern.periods = job.rows / pattern.rows;
  std::vector<Load>& loads = pattern.loads;
  int64_t place = 0;
  int64_t copies = 0;  // that columns would need
  const auto load_byte = [&](const Piece& piece, const char* byte) {
    const int64_t stride = pattern.rows * piece.stride;
    const auto has_byte = [&](const Load& load) {
      return load.stride == stride && byte >= load.from && byte < load.from + kLanes;
    };
    const size_t vector_begin = pattern.ends.empty() ? 0 : pattern.ends.back();
    auto load = std::find_if(loads.begin() + vector_begin, loads.end(), has_byte);
    if (load == loads.end()) {
      load = loads.insert(load, {byte, stride, {}});
      std::fill_n(load->lane, kLanes, kNoByte);
      const int64_t left = static_cast<const char*>(piece.end) - byte - kLanes;
      pattern.periods = std::min(pattern.periods, left < 0 ? 0 : left / stride + 1);
    }
    load->lane[place % kLanes] = static_cast<uint8_t>(byte - load->from);
  };
  for (int64_t row = 0; row < pattern.rows; ++row) {
    for (int64_t s = 0; s < count; ++s) {
      const Piece& piece = *segments[s].piece;
      const char* from = static_cast<const char*>(piece.source) + row * piece.stride;
      copies += 1 + piece.extent / kLanes;
      for (int64_t i = 0; i < piece.extent; ++i) {
        if (i < piece.size) load_byte(piece, from + i);
        if (++place % kLanes == 0) pattern.ends.push_back(loads.size());
      }
    }
  }
  if (2 * static_cast<int64_t>(loads.size()) > copies) pattern.periods = 0;
#endif
  return pattern;
}

#if defined(__x86_64__)

// Stores one vector in each of `periods` periods, from kLoads loads.
template <int kLoads>
__attribute__((target("ssse3"))) void WeaveVector(const Load* loads, char* to, int64_t to_stride,
                                                  int64_t first, int64_t periods) {
  const char* from[kLoads + 1];
  int64_t stride[kLoads + 1];
  __m128i lanes[kLoads + 1];
  for (int i = 0; i < kLoads; ++i) {
    from[i] = loads[i].from + first * loads[i].stride;
    stride[i] = loads[i].stride;
    lanes[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(loads[i].lane));
  }
  for (; periods > 0; --periods, to += to_stride) {
    __m128i vector = _mm_setzero_si128();
#pragma GCC unroll 16
    for (int i = 0; i < kLoads; ++i) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[i]));
      vector = _mm_or_si128(vector, _mm_shuffle_epi8(bytes, lanes[i]));
      from[i] += stride[i];
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), vector);
  }
}

using WeaveFunction = void (*)(const Load*, char*, int64_t, int64_t, int64_t);

template <int... kLoads>
constexpr std::array<WeaveFunction, sizeof...(kLoads)> WeaveFunctions(
    std::integer_sequence<int, kLoads...>) {
  return {WeaveVector<kLoads>...};
}

// The function for each number of loads.
constexpr auto kWeave = WeaveFunctions(std::make_integer_sequence<int, kLanes + 1>());

#endif

void Weave(const Pattern& pattern, char* out, int64_t first, int64_t last) {
#if defined(__x86_64__)
  char* to = out + first * pattern.bytes;
  size_t begin = 0;
  for (const size_t end : pattern.ends) {
    kWeave[end - begin](pattern.loads.data() + begin, to, pattern.bytes, first, last - first);
    begin = end;
    to += kLanes;
  }
#endif
}

// Segments of one destination, or of several that have no pattern.
struct Target {
  const Segment* segments;
  int64_t count;
  Pattern pattern;
};

// Fills the rows [first, last) of a destination; `first` is a multiple of kLanes.
void MakeRows(const Job& job, const Target& target, int64_t first, int64_t last, bool past_cache) {
  const Pattern& pattern = target.pattern;
  const int64_t first_period = first / pattern.rows;
  const int64_t last_period = std::min(last / pattern.rows, pattern.periods);
  if (first_period < last_period) {
    Weave(pattern, target.segments->out, first_period, last_period);
    first = last_period * pattern.rows;
  }
  if (first < last) {
    CopySegments(job, target.segments, target.count, first, last, past_cache);
  }
}

// --- long lines ----------------------------------------------------------------------------------

// Copies the bytes [first, last) of a piece of one row.
void CopySpan(const Job& job, const Segment& segment, int64_t row, int64_t first, int64_t last,
              bool past_cache) {
  const Piece& piece = *segment.piece;
  char* out = segment.out + row * segment.row_bytes;
  const int64_t filled = std::clamp(piece.size, first, last);
  if (filled > first) {
    const auto* from = static_cast<const char*>(piece.source);
    from += SourceRow(job, piece, row) * piece.stride + first;
    if (past_cache) {
      CopyPastCache(out + first, from, filled - first);
    } else {
      std::memcpy(out + first, from, filled - first);
    }
  }
  if (last > filled) std::memset(out + filled, 0, last - filled);
}

int64_t RoundUp(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

void RunMove(const Job& job, const jaxops::cpu::ParallelFor& parallel_for) {
  const std::vector<Segment> line = MakeLine(job);
  if (line.empty() || job.rows == 0) return;
  const int64_t line_bytes = line.back().end();
  const int64_t line_cost = line_bytes + kPieceBytes * static_cast<int64_t>(line.size());
  const auto run = [&](int64_t tasks, const auto& task) {
    if (job.rows * line_cost >= kThreadsBytes) return parallel_for(tasks, task);
    for (int64_t i = 0; i < tasks; ++i) task(i);
  };
  const Segment& sampled = *std::max_element(
      line.begin(), line.end(),
      [](const Segment& a, const Segment& b) { return a.piece->extent < b.piece->extent; });
  const bool past_cache =
      job.rows * line_bytes >= kUncachedBytes &&
      IsResident(sampled.out + job.rows / 2 * sampled.row_bytes + sampled.piece->extent / 2);
  if (line_bytes < kTaskBytes) {
    std::vector<Target> targets;
    for (size_t s = 0, end = 0; s < line.size(); s = end) {
      while (end < line.size() && line[end].destination == line[s].destination) ++end;
      const auto count = static_cast<int64_t>(end - s);
      Pattern pattern = MakePattern(job, &line[s], count);
      if (pattern.periods == 0 && !targets.empty() && targets.back().pattern.periods == 0) {
        targets.back().count += count;
      } else {
        targets.push_back({&line[s], count, std::move(pattern)});
      }
    }
    const int64_t task_rows = RoundUp(kTaskBytes / line_bytes, kLanes);
    const int64_t block_rows = std::max(RoundUp(kBlockBytes / line_bytes, kLanes), kBlockRows);
    run((job.rows + task_rows - 1) / task_rows, [&](int64_t task) {
      const int64_t last = std::min((task + 1) * task_rows, job.rows);
      for (int64_t row = task * task_rows; row < last; row += block_rows) {
        const int64_t end = std::min(row + block_rows, last);
        for (const Target& target : targets) MakeRows(job, target, row, end, past_cache);
      }
      if (past_cache) FenceStores();
    });
    return;
  }
  const int64_t spans = (line_bytes + kTaskBytes - 1) / kTaskBytes;
  run(job.rows * spans, [&](int64_t task) {
    const int64_t row = task / spans;
    const int64_t first = task % spans * kTaskBytes;
    const int64_t last = std::min(first + kTaskBytes, line_bytes);
    auto segment = std::upper_bound(
        line.begin(), line.end(), first,
        [](int64_t position, const Segment& segment) { return position < segment.end(); });
    for (; segment != line.end() && segment->begin < last; ++segment) {
      CopySpan(job, *segment, row, std::max(first - segment->begin, int64_t{0}),
               std::min(last, segment->end()) - segment->begin, past_cache);
    }
    if (past_cache) FenceStores();
  });
}

}  // namespace jaxops::concatenate::cpu
