// The vectorised inner parts of lightweight convolution, built once per instruction set.
//
// Both layouts are computed on panels: contiguous vectors in scratch memory, of the arithmetic type
// and with the zeros around the sequence. With NTC a panel holds a vector of channels at every time
// step. With NCT a panel holds one channel, and a vector holds consecutive time steps, one a lane.
// In both a tap is a constant distance in the panel. With NTC, at most 8 taps, and neither
// dilation, segments nor a state, rows of x are read where they are instead, and with NCT, at most
// 1 + kMaxTapSpan taps, and neither dilation nor segments, steps are.
//
// In panels, segments cost nothing where all taps of a tile of steps are of one. Other tiles read,
// with NTC, a row of zeros for taps of other segments, through a table of rows; with NCT they mask
// lanes.
#ifndef JAXOPS_CPU_LIGHTWEIGHT_CONV_KERNELS_H_
#define JAXOPS_CPU_LIGHTWEIGHT_CONV_KERNELS_H_

#include <cstdint>

#include "common/lightweight_conv.h"
#include "cpu/isa.h"

namespace jaxops::lightweight_conv::cpu {

// No instruction set has more lanes than this.
inline constexpr int64_t kMaxLanes = 16;

// Channels of a block, at most.
inline constexpr int64_t kMaxBlockChannels = 1024;

// Taps are computed in groups that span at most this number of steps, which bounds the panels.
inline constexpr int64_t kMaxTapSpan = 384;

// Channels [channel_begin, channel_end) at steps [time_begin, time_end) of one batch entry.
// time_end is the end of the sequence or a multiple of kMaxLanes.
struct Block {
  int64_t channel_begin;
  int64_t channel_end;
  int64_t time_begin;
  int64_t time_end;
};

// Scratch is given in entries of the arithmetic type. `width` below is the number of channels of a
// block rounded up to kMaxLanes, `steps` its number of steps.
struct PackWeight {
  Geometry geometry;
  DType dtype;  // of the sequences; decides the arithmetic type
  DType weight_dtype;
  bool flip_taps;
  int64_t channel_begin;
  int64_t channel_end;
  const void* weight;  // (heads, taps)
  void* packed;        // width * taps
};

// The segments and states of one batch entry, and scratch for them.
struct Segments {
  const int32_t* starts;  // as in Forward; null: none
  const void* state;      // as in Forward; null: none
  DType state_dtype;
  const int32_t* slots;  // as in Forward; null: none
  int64_t num_slots;
  void* marks;  // 2 * steps + min(kMaxTapSpan, reach) + 4 * kMaxLanes
  void* table;  // NTC: steps * (the taps of a group)
};

struct Convolve {
  Geometry geometry;
  DType dtype;
  DType bias_dtype;
  Activation activation;
  Block block;
  Segments segments;
  const void* x;  // the batch entry
  const void* packed_weight;
  const void* bias;  // null: none
  void* y;           // the batch entry
  void* window;      // width * (steps + min(kMaxTapSpan, reach) + 3 * kMaxLanes)
  void* sums;        // width * (steps + 8 * kMaxLanes)
};

// Adds the block's terms of dweight and dbias, lane by lane.
struct FilterGrad {
  Geometry geometry;
  DType dtype;
  Block block;
  Segments segments;
  const void* x;    // the batch entry
  const void* g;    // the batch entry
  void* window;     // as above
  void* cotangent;  // like sums above
  void* dweight;    // NTC: width * taps; NCT: heads of the block * taps * kMaxLanes
  void* dbias;      // width * kMaxLanes
};

// Adds the lanes of each sum that FilterGrad has written.
struct ReduceLanes {
  Geometry geometry;
  DType dtype;
  int64_t channel_begin;
  int64_t channel_end;
  const void* lanes_dweight;
  const void* lanes_dbias;
  void* dweight;  // (heads of the block, taps)
  void* dbias;    // (channels of the block,)
};

// Rounds `count` sums of dtype's arithmetic type and stores them as `to_dtype`, at `to` + offset.
struct StoreSums {
  DType dtype;
  DType to_dtype;
  int64_t count;
  int64_t offset;
  const void* sums;
  void* to;
};

struct Kernels {
  void (*pack_weight)(const PackWeight&);
  void (*convolve)(const Convolve&);
  void (*filter_grad)(const FilterGrad&);
  void (*reduce_lanes)(const ReduceLanes&);
  void (*store_sums)(const StoreSums&);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::lightweight_conv::cpu

#endif  // JAXOPS_CPU_LIGHTWEIGHT_CONV_KERNELS_H_
