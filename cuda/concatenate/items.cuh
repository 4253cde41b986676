// StoreItems gathers items one by one into vectors.
#ifndef JAXOPS_CUDA_CONCATENATE_ITEMS_CUH_
#define JAXOPS_CUDA_CONCATENATE_ITEMS_CUH_

#include "cuda/concatenate/vectors.cuh"

namespace jaxops::concatenate::cuda {

using jaxops::cuda::kWarp;

// Word packs items of at most 4 bytes into 4 bytes.
template <typename Item>
__device__ __forceinline__ uint32_t Word(const Item* items) {
  if constexpr (sizeof(Item) == 4) {
    return items[0];
  } else if constexpr (sizeof(Item) == 2) {
    return __byte_perm(items[0], items[1], 0x5410);
  } else {
    return __byte_perm(__byte_perm(items[0], items[1], 0x0040),
                       __byte_perm(items[2], items[3], 0x0040), 0x5410);
  }
}

// StoreItems stores one vector of items at `data`, beginning with item `first` of `count`;
// `items_from(i)` iterates over the items from number i on.
template <typename Item, typename ItemsFrom>
__device__ __forceinline__ void StoreItems(unsigned char* data, uint32_t first, uint32_t count,
                                           ItemsFrom&& items_from) {
  constexpr int kWordItems = sizeof(Item) < 4 ? 4 / sizeof(Item) : 1;
  unsigned char* to = data + uint64_t{first} * sizeof(Item);
  if constexpr (sizeof(Item) < 4) {
    // If each lane gathered its own vector of small items, each load would touch as many lines as a
    // load of vectors. Lanes therefore gather neighbouring 4-byte words and exchange them.
    __shared__ uint4 shared[kVectorThreads];
    const uint32_t lane = threadIdx.x % kWarp;
    const uint32_t begin = first - lane * kItems<Item>;
    if (begin + kWarp * kItems<Item> <= count) {
      uint4* vectors = shared + (threadIdx.x - lane);
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        auto items_of_word = items_from(begin + (w * kWarp + lane) * kWordItems);
        Item items[kWordItems];
#pragma unroll
        for (int i = 0; i < kWordItems; ++i, items_of_word.Advance()) {
          items[i] = items_of_word.Next();
        }
        words[w] = Word(items);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) reinterpret_cast<uint32_t*>(vectors)[w * kWarp + lane] = words[w];
      __syncwarp();
      Store(to, vectors[lane]);
      return;
    }
  }
  if (first >= count) return;
  auto rest = items_from(first);
  if constexpr (sizeof(Item) >= 4) {
    if (first + kItems<Item> <= count) {
      Item items[kItems<Item>];
#pragma unroll
      for (int i = 0; i < kItems<Item>; ++i, rest.Advance()) items[i] = rest.Next();
      if constexpr (sizeof(Item) == 16) {
        Store(to, items[0]);
      } else if constexpr (sizeof(Item) == 8) {
        Store(to, {items[0].x, items[0].y, items[1].x, items[1].y});
      } else {
        Store(to, {items[0], items[1], items[2], items[3]});
      }
      return;
    }
  }
  const uint32_t end = min(count, first + kItems<Item>);
#pragma unroll 1
  for (uint32_t i = first; i < end; ++i, rest.Advance()) {
    reinterpret_cast<Item*>(data)[i] = rest.Next();
  }
}

}  // namespace jaxops::concatenate::cuda

#endif  // JAXOPS_CUDA_CONCATENATE_ITEMS_CUH_
