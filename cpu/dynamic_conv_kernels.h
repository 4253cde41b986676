// The vectorised inner parts of dynamic convolution, built once per instruction set.
//
// Both layouts are computed on panels in scratch memory: a panel holds one channel, or one tap of
// one head, and a vector holds consecutive time steps, one a lane. With NTC, blocks of vectors are
// transposed in registers when they are loaded and stored. The forward pass with NTC and heads of
// whole vectors of channels has no panels of sequences; a vector has neighbouring channels there.
#ifndef JAXOPS_CPU_DYNAMIC_CONV_KERNELS_H_
#define JAXOPS_CPU_DYNAMIC_CONV_KERNELS_H_

#include <cstdint>

#include "common/dynamic_conv.h"
#include "cpu/isa.h"

namespace jaxops::dynamic_conv::cpu {

// No instruction set has more lanes than this.
inline constexpr int64_t kMaxLanes = 16;

// Channels that are computed at a time, at most.
inline constexpr int64_t kMaxWidth = 128;

// Heads [head_begin, head_end) at steps [time_begin, time_end) of one batch entry.
struct Block {
  int64_t head_begin;
  int64_t head_end;
  int64_t time_begin;
  int64_t time_end;
};

// The first valid tap of any step of a vector and the one past the last; whether every step has
// all.
struct VectorTaps {
  bool all;
  int64_t begin;
  int64_t end;
};

// Scratch memory for the valid taps of each step of a block: `steps` entries of an integer type of
// the size of the arithmetic type, and one for each vector.
struct TapScratch {
  void* begins;
  void* ends;
  VectorTaps* vectors;
};

// Scratch memory of a thread, in entries of the arithmetic type. `taps` is the number of taps of
// all heads of a block, `steps` that of its steps, rounded up to kMaxLanes, and `width` that of the
// channels that are computed at a time, likewise.
struct Scratch {
  int64_t width;
  void* tile;           // (taps + kMaxLanes) * kMaxLanes
  void* weight;         // taps * (steps + 2 * kMaxLanes)
  void* probabilities;  // likewise; backward with `normalize` only
  void* dweight;        // likewise; backward only
  void* window;         // width * pitch
  void* cotangent;      // width * pitch; backward only
  void* sums;           // width * (steps + kMaxLanes)
  TapScratch ascending;
  TapScratch descending;  // backward only
  int64_t pitch;  // at least 3 * kMaxLanes more than the steps that a block reads, odd vectors
};

struct ForwardBlock {
  const Forward* call;  // its pointers are to one batch entry
  Block block;
  Scratch scratch;
};

struct BackwardBlock {
  const Backward* call;  // its pointers are to one batch entry
  Block block;
  Scratch scratch;
};

struct Kernels {
  int64_t lanes;  // of float vectors; those of double have half of them
  void (*forward)(const ForwardBlock&);
  // The same for NTC if the channels of a head are whole vectors: of the scratch memory it needs
  // the tile, the taps, `sums` for a block's channels and `window` for the rows that it reads.
  void (*forward_rows)(const ForwardBlock&);
  void (*backward)(const BackwardBlock&);
};

JAXOPS_DECLARE_KERNELS();

}  // namespace jaxops::dynamic_conv::cpu

#endif  // JAXOPS_CPU_DYNAMIC_CONV_KERNELS_H_
