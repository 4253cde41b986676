// Element types: how kernels accumulate, load and store each type.
#ifndef JAXOPS_CUDA_COMMON_NUMERIC_CUH_
#define JAXOPS_CUDA_COMMON_NUMERIC_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/types.h"
#include "cuda/common/sizes.h"

namespace jaxops::cuda {

// f16 and bf16 accumulate in f32, f64 in f64.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ __forceinline__ float Widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float Widen(float x) { return x; }
__device__ __forceinline__ double Widen(double x) { return x; }

template <typename T>
__device__ __forceinline__ T Narrow(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// The elements of the widest access.
template <typename T>
inline constexpr int kVectorElements = kVectorBytes / sizeof(T);

// `kCount` elements that move as one access, or as several accesses of kVectorBytes. An address
// must be aligned to the access. The alignment is at most kVectorBytes, because no address is known
// to be aligned to more, and GPUs with wider accesses would fault.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < kVectorBytes ? sizeof(T) * kCount : kVectorBytes) Vector {
  T values[kCount];
};

template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> LoadVector(const T* address) {
  return *reinterpret_cast<const Vector<T, kCount>*>(address);
}

// Neighbouring elements as they are in memory. 16-bit elements stay in pairs until they are
// widened: the compiler takes apart a Vector of them that a loop carries or a condition selects,
// and puts it together again.
template <typename T, int kCount>
struct Raw {
  using Word = std::conditional_t<sizeof(T) == 2 && kCount % 2 == 0, uint32_t, T>;
  static constexpr int kWords = kCount * sizeof(T) / sizeof(Word);

  Vector<Word, kWords> words;
};

template <int kCount, typename T>
__device__ __forceinline__ Raw<T, kCount> LoadRaw(const T* address) {
  return *reinterpret_cast<const Raw<T, kCount>*>(address);
}

// LoadRawIf returns zeros if the elements do not exist. The compiler loads under a predicate, so
// that neighbouring loads do not wait for each other.
template <int kCount, typename T>
__device__ __forceinline__ Raw<T, kCount> LoadRawIf(bool exists, const T* address) {
  if (exists) return LoadRaw<kCount>(address);
  return {};
}

template <int kCount, typename T, typename Acc>
__device__ __forceinline__ void WidenAll(Acc* wide, const Raw<T, kCount>& raw) {
  if constexpr (std::is_same_v<typename Raw<T, kCount>::Word, T>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) wide[i] = Widen(raw.words.values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const uint32_t pair = raw.words.values[i];
      if constexpr (std::is_same_v<T, __half>) {
        __half2 halves;
        memcpy(&halves, &pair, sizeof(pair));
        const float2 both = __half22float2(halves);
        wide[2 * i] = both.x;
        wide[2 * i + 1] = both.y;
      } else {
        // Element by element, the compiler first moves the upper one to the lower half.
        wide[2 * i] = __uint_as_float(pair << 16);
        wide[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
      }
    }
  }
}

template <int kCount, typename T, typename Acc>
__device__ __forceinline__ void WidenAll(Acc* wide, const Vector<T, kCount>& vector) {
  Raw<T, kCount> raw;
  memcpy(&raw, &vector, sizeof(raw));
  WidenAll(wide, raw);
}

// Adds the product of a tap and the row that it reads.
template <typename T, typename Acc, typename W, int kV>
__device__ __forceinline__ void AddTap(Acc (&sums)[kV], const W (&weight)[kV],
                                       const Raw<T, kV>& row) {
  Acc wide[kV];
  WidenAll(wide, row);
#pragma unroll
  for (int v = 0; v < kV; ++v) sums[v] += Widen(weight[v]) * wide[v];
}

// Adds the products of taps and their rows in ascending order: sums of the same taps then have the
// same bits in every kernel.
template <typename T, typename Acc, typename W, int kTaps, int kV>
__device__ __forceinline__ void AddTaps(Acc (&sums)[kV], const W (&weight)[kTaps][kV],
                                        const Raw<T, kV>* rows) {
#pragma unroll
  for (int k = 0; k < kTaps; ++k) AddTap(sums, weight[k], rows[k]);
}

// Stores a Vector to global memory as one access, where the compiler might use one access for each
// element.
template <typename T, int kCount>
__device__ __forceinline__ void StoreVector(T* address, const Vector<T, kCount>& vector) {
  if constexpr (sizeof(vector) == sizeof(uint4)) {
    uint4 words;
    memcpy(&words, &vector, sizeof(vector));
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  } else if constexpr (sizeof(vector) == sizeof(uint2)) {
    uint2 words;
    memcpy(&words, &vector, sizeof(vector));
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(words.x), "r"(words.y)
                 : "memory");
  } else {
    *reinterpret_cast<Vector<T, kCount>*>(address) = vector;
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void StoreRaw(T* address, const Raw<T, kCount>& raw) {
  StoreVector(reinterpret_cast<typename Raw<T, kCount>::Word*>(address), raw.words);
}

// Calls `read` with `base` as a pointer to its element type, known only at run time: for small
// operands such as filters. One branch covers all of the caller's reads, so that the reads are in
// flight together.
template <typename Read>
__device__ __forceinline__ void WithElements(const void* base, DType dtype, Read&& read) {
  switch (dtype) {
    case DType::kF16:
      return read(static_cast<const __half*>(base));
    case DType::kBF16:
      return read(static_cast<const __nv_bfloat16*>(base));
    case DType::kF32:
      return read(static_cast<const float*>(base));
    case DType::kF64:
      return read(static_cast<const double*>(base));
  }
}

template <typename Acc>
__device__ __forceinline__ void StoreAs(void* base, int64_t index, DType dtype, Acc value) {
  switch (dtype) {
    case DType::kF16:
      static_cast<__half*>(base)[index] = __float2half_rn(static_cast<float>(value));
      break;
    case DType::kBF16:
      static_cast<__nv_bfloat16*>(base)[index] = __float2bfloat16_rn(static_cast<float>(value));
      break;
    case DType::kF32:
      static_cast<float*>(base)[index] = static_cast<float>(value);
      break;
    case DType::kF64:
      static_cast<double*>(base)[index] = static_cast<double>(value);
      break;
  }
}

// Calls `function` with a value of the element type: the only step from run time to templates.
template <typename Function>
auto DispatchFloat(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kF16:
      return function(__half{});
    case DType::kBF16:
      return function(__nv_bfloat16{});
    case DType::kF64:
      return function(double{});
    case DType::kF32:
      break;
  }
  return function(float{});
}

template <typename Function>
auto DispatchBool(bool value, Function&& function) {
  return value ? function(std::true_type{}) : function(std::false_type{});
}

}  // namespace jaxops::cuda

#endif  // JAXOPS_CUDA_COMMON_NUMERIC_CUH_
