#include "core/vector.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "core/half.h"

namespace ddl {
namespace {

// The loops are written once, as templates over the vector's width, and inlined into functions that
// are compiled for one instruction set each. The library itself is compiled for the plainest of the
// architecture: x86-64 with SSE2, aarch64 with NEON. On others the compiler makes what it can of
// vectors of 16 bytes.
#define DDL_INLINE [[gnu::always_inline]] inline

// In memory they begin anywhere: those of two halves, read as one word, at every half.
template <typename T, int kWidth>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kWidth), aligned(1), may_alias));
};

// Integers are added without sign, because a signed overflow is undefined and this one wraps.
template <typename T, bool = std::is_integral_v<T>>
struct AdditionOf {
  using Type = T;
};
template <typename T>
struct AdditionOf<T, true> {
  using Type = std::make_unsigned_t<T>;
};

// Only the assembler's name of the instruction is the same for all widths, so no intrinsic will do.
// Plain stores elsewhere: what a hint like aarch64's STNP would gain has not been measured.
template <typename V>
DDL_INLINE void StoreNonTemporal(char* out, const V& value) {
#if !defined(__x86_64__)
  *reinterpret_cast<V*>(out) = value;
#else
  if constexpr (sizeof(V) == 16) {
    asm volatile("movntps %1, %0" : "=m"(*reinterpret_cast<V*>(out)) : "x"(value));
  } else {
    asm volatile("vmovntps %1, %0" : "=m"(*reinterpret_cast<V*>(out)) : "v"(value));
  }
#endif
}

template <bool kNonTemporal, typename V>
DDL_INLINE void Store(char* out, const V& value) {
  if constexpr (kNonTemporal) {
    StoreNonTemporal(out, value);
  } else {
    *reinterpret_cast<V*>(out) = value;
  }
}

// How far ahead input is fetched that is not in the caches: a page, the distance at which the
// processor's own prefetchers stop. Of 1 to 8 KiB none was better (AMD Zen 4).
constexpr int64_t kPrefetchBytes = 4096;

// `nbytes` of it. No matter whether such memory exists: it is a hint that cannot fault.
template <int64_t kBytes>
DDL_INLINE void Prefetch(const char* in) {
  for (int64_t at = 0; at < kBytes; at += 64) __builtin_prefetch(in + kPrefetchBytes + at, 0, 2);
}

// What becomes of Sum::copy.
enum class CopyStore { kNone, kCached, kNonTemporal };

template <typename T, int kWidth, bool kNonTemporal, CopyStore kCopy, bool kDivide>
DDL_INLINE void SumLoop(const Sum& sum) {
  using A = typename AdditionOf<T>::Type;
  using V = typename VectorOf<A, kWidth>::Type;
  using S = typename VectorOf<T, kWidth>::Type;
  constexpr int64_t kLanes = kWidth / sizeof(T);
  constexpr int kVectors = 4;  // at once, so that the loop over the sources costs little
  const char* const* sources = reinterpret_cast<const char* const*>(sum.sources);
  char* out = static_cast<char*>(sum.out);
  char* copy = static_cast<char*>(sum.copy);
  const char* prefetched = sum.prefetch < 0 ? nullptr : sources[sum.prefetch];
  const T divisor = static_cast<T>(sum.divisor);
  int64_t i = 0;
  for (; i + kVectors * kLanes <= sum.count; i += kVectors * kLanes) {
    const int64_t at = i * static_cast<int64_t>(sizeof(T));
    if (prefetched != nullptr) Prefetch<kVectors * kWidth>(prefetched + at);
    V total[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      total[v] = *reinterpret_cast<const V*>(sources[0] + at + v * kWidth);
    }
    for (int s = 1; s < sum.num_sources; ++s) {
      const char* source = sources[s] + at;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        total[v] += *reinterpret_cast<const V*>(source + v * kWidth);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kDivide) total[v] = (V)((S)total[v] / divisor);
      if constexpr (kCopy != CopyStore::kNone) {
        Store<kCopy == CopyStore::kNonTemporal>(copy + at + v * kWidth, total[v]);
      }
      Store<kNonTemporal>(out + at + v * kWidth, total[v]);
    }
  }
  for (; i < sum.count; ++i) {
    const int64_t at = i * static_cast<int64_t>(sizeof(T));
    A total, next;
    std::memcpy(&total, sources[0] + at, sizeof(A));
    for (int s = 1; s < sum.num_sources; ++s) {
      std::memcpy(&next, sources[s] + at, sizeof(A));
      total += next;
    }
    if constexpr (kDivide) total = static_cast<A>(static_cast<T>(total) / divisor);
    if constexpr (kCopy != CopyStore::kNone) std::memcpy(copy + at, &total, sizeof(A));
    std::memcpy(out + at, &total, sizeof(A));
  }
}

// A vector of halves as two of floats. bfloat16 is the upper half of a float32, so those at even
// and those at odd places are taken apart by masks, on any processor, and NaNs need no care here:
// they stay NaNs.
template <int kWidth>
struct Bfloat16 {
  using Words = typename VectorOf<uint32_t, kWidth>::Type;
  using Floats = typename VectorOf<float, kWidth>::Type;

  DDL_INLINE static void Load(const char* in, Floats* even, Floats* odd) {
    const Words words = *reinterpret_cast<const Words*>(in);
    *even = (Floats)(words << 16);
    *odd = (Floats)(words & 0xffff0000u);
  }

  DDL_INLINE static void Join(const Floats& even, const Floats& odd, Words* joined) {
    Words upper, lower;
    Round(even, &lower);
    Round(odd, &upper);
    *joined = (lower >> 16) | (upper & 0xffff0000u);
  }

 private:
  // As core/half does it.
  DDL_INLINE static void Round(const Floats& floats, Words* rounded) {
    const Words bits = (Words)floats;
    const Words nearest = bits + 0x7fffu + (bits >> 16 & 1u);
    *rounded = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x00400000u : nearest;
  }
};

// By the processor's own instructions. SSE2 has none.
template <int kWidth>
struct Float16 {
  static constexpr bool kExists = false;
};

#if defined(__x86_64__)

// Those that AVX2 comes with, again by the assembler's name.
template <int kWidth>
struct Float16OfAvx2 {
  static constexpr bool kExists = true;
  using Words = typename VectorOf<uint32_t, kWidth>::Type;
  using Floats = typename VectorOf<float, kWidth>::Type;
  using Half = typename VectorOf<uint64_t, kWidth / 2>::Type;

  DDL_INLINE static void Load(const char* in, Floats* first, Floats* second) {
    asm("vcvtph2ps %1, %0" : "=v"(*first) : "m"(*reinterpret_cast<const Half*>(in)));
    asm("vcvtph2ps %1, %0" : "=v"(*second) : "m"(*reinterpret_cast<const Half*>(in + kWidth / 2)));
  }

  DDL_INLINE static void Join(const Floats& first, const Floats& second, Words* joined) {
    Half halves[2];
    asm("vcvtps2ph $0, %1, %0" : "=v"(halves[0]) : "v"(first));  // 0: to nearest, ties to even
    asm("vcvtps2ph $0, %1, %0" : "=v"(halves[1]) : "v"(second));
    if constexpr (kWidth == 32) {
      *joined = (Words)__builtin_shufflevector(halves[0], halves[1], 0, 1, 2, 3);
    } else {
      *joined = (Words)__builtin_shufflevector(halves[0], halves[1], 0, 1, 2, 3, 4, 5, 6, 7);
    }
  }
};
template <>
struct Float16<32> : Float16OfAvx2<32> {};
template <>
struct Float16<64> : Float16OfAvx2<64> {};

#elif defined(__aarch64__)

template <>
struct Float16<16> {
  static constexpr bool kExists = true;
  using Words = typename VectorOf<uint32_t, 16>::Type;
  using Floats = typename VectorOf<float, 16>::Type;

  DDL_INLINE static void Load(const char* in, Floats* first, Floats* second) {
    const float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(in)));
    *first = vcvt_f32_f16(vget_low_f16(halves));
    *second = vcvt_high_f32_f16(halves);
  }

  DDL_INLINE static void Join(const Floats& first, const Floats& second, Words* joined) {
    *joined = (Words)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)first), (float32x4_t)second);
  }
};

#endif

// The smallest and largest are NaN if one is: `a != a` only then.
template <ReduceOp kOp, typename A>
DDL_INLINE void Join(A* a, const A& b) {
  if constexpr (kOp == ReduceOp::kSum) *a = *a + b;
  if constexpr (kOp == ReduceOp::kProduct) *a = *a * b;
  if constexpr (kOp == ReduceOp::kMin) *a = (*a != *a) | (*a < b) ? *a : b;
  if constexpr (kOp == ReduceOp::kMax) *a = (*a != *a) | (*a > b) ? *a : b;
}

// From element `first` on, in blocks that stay in the first cache.
template <ReduceOp kOp = ReduceOp::kSum>
void SumHalvesInBlocks(const Sum& sum, int64_t first) {
  constexpr int64_t kBlock = 1024;
  float total[kBlock], next[kBlock];
  for (; first < sum.count; first += kBlock) {
    const int64_t n = std::min(kBlock, sum.count - first);
    const int64_t at = first * static_cast<int64_t>(sizeof(uint16_t));
    Widen(static_cast<const char*>(sum.sources[0]) + at, total, n, sum.dtype);
    for (int s = 1; s < sum.num_sources; ++s) {
      Widen(static_cast<const char*>(sum.sources[s]) + at, next, n, sum.dtype);
      for (int64_t i = 0; i < n; ++i) Join<kOp>(&total[i], next[i]);
    }
    if (sum.divisor != 1) {
      const float divisor = static_cast<float>(sum.divisor);
      for (int64_t i = 0; i < n; ++i) total[i] /= divisor;
    }
    char* out = static_cast<char*>(sum.out) + at;
    Narrow(total, out, n, sum.dtype);
    if (sum.copy != nullptr) {
      std::memcpy(static_cast<char*>(sum.copy) + at, out, n * sizeof(uint16_t));
    }
  }
}

template <typename Halves, int kWidth, bool kNonTemporal, CopyStore kCopy, bool kDivide>
DDL_INLINE void SumHalvesLoop(const Sum& sum) {
  using F = typename Halves::Floats;
  using W = typename Halves::Words;
  constexpr int kVectors = 2;  // at once, each of them two of floats
  constexpr int64_t kStep = kVectors * kWidth / static_cast<int64_t>(sizeof(uint16_t));
  const char* const* sources = reinterpret_cast<const char* const*>(sum.sources);
  char* out = static_cast<char*>(sum.out);
  char* copy = static_cast<char*>(sum.copy);
  const char* prefetched = sum.prefetch < 0 ? nullptr : sources[sum.prefetch];
  const float divisor = static_cast<float>(sum.divisor);
  int64_t i = 0;
  for (; i + kStep <= sum.count; i += kStep) {
    const int64_t at = i * static_cast<int64_t>(sizeof(uint16_t));
    if (prefetched != nullptr) Prefetch<kVectors * kWidth>(prefetched + at);
    F total[2 * kVectors], next[2];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Halves::Load(sources[0] + at + v * kWidth, &total[2 * v], &total[2 * v + 1]);
    }
    for (int s = 1; s < sum.num_sources; ++s) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        Halves::Load(sources[s] + at + v * kWidth, &next[0], &next[1]);
        total[2 * v] += next[0];
        total[2 * v + 1] += next[1];
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kDivide) {
        total[2 * v] /= divisor;
        total[2 * v + 1] /= divisor;
      }
      W joined;
      Halves::Join(total[2 * v], total[2 * v + 1], &joined);
      if constexpr (kCopy != CopyStore::kNone) {
        Store<kCopy == CopyStore::kNonTemporal>(copy + at + v * kWidth, joined);
      }
      Store<kNonTemporal>(out + at + v * kWidth, joined);
    }
  }
  if (i < sum.count) SumHalvesInBlocks(sum, i);
}

// T is a type of C++, or one of those two.
template <typename T, int kWidth, bool kNonTemporal, CopyStore kCopy, bool kDivide>
DDL_INLINE void SumOne(const Sum& sum) {
  if constexpr (std::is_arithmetic_v<T>) {
    SumLoop<T, kWidth, kNonTemporal, kCopy, kDivide>(sum);
  } else {
    SumHalvesLoop<T, kWidth, kNonTemporal, kCopy, kDivide>(sum);
  }
}

template <typename T, int kWidth, bool kNonTemporal, CopyStore kCopy>
DDL_INLINE void SumDivided(const Sum& sum) {
  if constexpr (!std::is_same_v<T, int32_t>) {  // of which averages are summed wide
    if (sum.divisor != 1) return SumOne<T, kWidth, kNonTemporal, kCopy, true>(sum);
  }
  return SumOne<T, kWidth, kNonTemporal, kCopy, false>(sum);
}

template <typename T, int kWidth>
DDL_INLINE void SumAs(const Sum& sum) {
  if (sum.copy == nullptr) return SumDivided<T, kWidth, false, CopyStore::kNone>(sum);
  if (sum.non_temporal_copy) {
    return sum.non_temporal ? SumDivided<T, kWidth, true, CopyStore::kNonTemporal>(sum)
                            : SumDivided<T, kWidth, false, CopyStore::kNonTemporal>(sum);
  }
  return sum.non_temporal ? SumDivided<T, kWidth, true, CopyStore::kCached>(sum)
                          : SumDivided<T, kWidth, false, CopyStore::kCached>(sum);
}

template <int kWidth>
DDL_INLINE void SumAny(const Sum& sum) {
  switch (sum.dtype) {
    case DType::kFloat32: return SumAs<float, kWidth>(sum);
    case DType::kFloat64: return SumAs<double, kWidth>(sum);
    case DType::kInt32: return SumAs<int32_t, kWidth>(sum);
    case DType::kInt64: return SumAs<int64_t, kWidth>(sum);
    case DType::kBfloat16: return SumAs<Bfloat16<kWidth>, kWidth>(sum);
    case DType::kFloat16:
      if constexpr (Float16<kWidth>::kExists) return SumAs<Float16<kWidth>, kWidth>(sum);
      return SumHalvesInBlocks(sum, 0);
    default: return;
  }
}

// What the loops above are not worth their code for: other ops than sums, and small or unsigned
// integers. Plain stores, and the plainest instructions.
template <typename T, ReduceOp kOp>
void FoldLoop(const Sum& sum) {
  constexpr int kWidth = 16, kVectors = 4;  // at once
  constexpr bool kOrders = kOp == ReduceOp::kMin || kOp == ReduceOp::kMax;
  using A = std::conditional_t<kOrders, T, typename AdditionOf<T>::Type>;
  using V = typename VectorOf<A, kWidth>::Type;
  constexpr int64_t kStep = kVectors * kWidth / static_cast<int64_t>(sizeof(T));
  const char* const* sources = reinterpret_cast<const char* const*>(sum.sources);
  char* out = static_cast<char*>(sum.out);
  char* copy = static_cast<char*>(sum.copy);
  for (int64_t i = 0; i < sum.count; i += kStep) {
    const int64_t at = i * static_cast<int64_t>(sizeof(T));
    const int64_t n = std::min(kStep, sum.count - i), nbytes = n * static_cast<int64_t>(sizeof(T));
    T results[kStep];
    if (n == kStep) {
      V total[kVectors];
      std::memcpy(total, sources[0] + at, sizeof(total));
      for (int s = 1; s < sum.num_sources; ++s) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          Join<kOp, V>(&total[v],
                       *reinterpret_cast<const V*>(sources[s] + at + v * kWidth));
        }
      }
      std::memcpy(results, total, sizeof(total));
    } else {
      for (int64_t j = 0; j < n; ++j) {
        A total, next;
        const int64_t here = at + j * static_cast<int64_t>(sizeof(T));
        std::memcpy(&total, sources[0] + here, sizeof(A));
        for (int s = 1; s < sum.num_sources; ++s) {
          std::memcpy(&next, sources[s] + here, sizeof(A));
          if constexpr (kOp == ReduceOp::kProduct && std::is_integral_v<A>) {
            // Without sign also where the language would make an int of 16 bits.
            total = static_cast<A>(std::uintmax_t{total} * next);
          } else {
            Join<kOp, A>(&total, next);
          }
        }
        results[j] = static_cast<T>(total);
      }
    }
    if constexpr (kOp == ReduceOp::kSum && std::is_same_v<T, uint64_t>) {
      if (sum.divisor != 1) {
        for (int64_t j = 0; j < n; ++j) results[j] /= static_cast<T>(sum.divisor);
      }
    }
    std::memcpy(out + at, results, nbytes);
    if (copy != nullptr) std::memcpy(copy + at, results, nbytes);
  }
}

// Averages of integers of up to 32 bits: added in 64, in blocks that stay in the first cache.
template <typename T>
void AverageInBlocks(const Sum& sum) {
  constexpr int64_t kBlock = 512;
  using Wide = std::conditional_t<std::is_unsigned_v<T>, uint64_t, int64_t>;
  const Wide divisor = sum.divisor;
  Wide total[kBlock];
  T values[kBlock];
  for (int64_t i = 0; i < sum.count; i += kBlock) {
    const int64_t n = std::min(kBlock, sum.count - i);
    const int64_t at = i * static_cast<int64_t>(sizeof(T)), nbytes = n * sizeof(T);
    std::fill_n(total, n, 0);
    for (int s = 0; s < sum.num_sources; ++s) {
      std::memcpy(values, static_cast<const char*>(sum.sources[s]) + at, nbytes);
      for (int64_t j = 0; j < n; ++j) total[j] += values[j];
    }
    for (int64_t j = 0; j < n; ++j) values[j] = static_cast<T>(total[j] / divisor);
    std::memcpy(static_cast<char*>(sum.out) + at, values, nbytes);
    if (sum.copy != nullptr) std::memcpy(static_cast<char*>(sum.copy) + at, values, nbytes);
  }
}

template <typename T>
void FoldAs(const Sum& sum) {
  switch (sum.op) {
    case ReduceOp::kMin: return FoldLoop<T, ReduceOp::kMin>(sum);
    case ReduceOp::kMax: return FoldLoop<T, ReduceOp::kMax>(sum);
    case ReduceOp::kProduct: return FoldLoop<T, ReduceOp::kProduct>(sum);
    case ReduceOp::kSum: break;
  }
  if constexpr (std::is_integral_v<T>) {
    if constexpr (sizeof(T) <= sizeof(int32_t)) {
      if (sum.divisor != 1) return AverageInBlocks<T>(sum);
    }
    return FoldLoop<T, ReduceOp::kSum>(sum);
  }
}

void FoldHalves(const Sum& sum) {
  switch (sum.op) {
    case ReduceOp::kMin: return SumHalvesInBlocks<ReduceOp::kMin>(sum, 0);
    case ReduceOp::kMax: return SumHalvesInBlocks<ReduceOp::kMax>(sum, 0);
    case ReduceOp::kProduct: return SumHalvesInBlocks<ReduceOp::kProduct>(sum, 0);
    case ReduceOp::kSum: return SumHalvesInBlocks(sum, 0);
  }
}

void Fold(const Sum& sum) {
  switch (sum.dtype) {
    case DType::kFloat32: return FoldAs<float>(sum);
    case DType::kFloat64: return FoldAs<double>(sum);
    case DType::kInt32: return FoldAs<int32_t>(sum);
    case DType::kInt64: return FoldAs<int64_t>(sum);
    case DType::kInt8: return FoldAs<int8_t>(sum);
    case DType::kUint8: return FoldAs<uint8_t>(sum);
    case DType::kInt16: return FoldAs<int16_t>(sum);
    case DType::kUint16: return FoldAs<uint16_t>(sum);
    case DType::kUint32: return FoldAs<uint32_t>(sum);
    case DType::kUint64: return FoldAs<uint64_t>(sum);
    case DType::kFloat16:
    case DType::kBfloat16: return FoldHalves(sum);
    default: return;
  }
}

// Whether the loops for sums have this type.
bool HasSumLoop(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kFloat16:
    case DType::kBfloat16: return true;
    default: return false;
  }
}

template <int kWidth, bool kNonTemporal>
DDL_INLINE void CopyLoop(char* out, const char* in, int64_t nbytes) {
  using V = typename VectorOf<char, kWidth>::Type;
  int64_t i = 0;
  for (; i + 4 * kWidth <= nbytes; i += 4 * kWidth) {
    V parts[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) parts[v] = *reinterpret_cast<const V*>(in + i + v * kWidth);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) Store<kNonTemporal>(out + i + v * kWidth, parts[v]);
  }
  std::memcpy(out + i, in + i, nbytes - i);
}

template <int kWidth>
DDL_INLINE void CopyAny(char* out, const char* in, int64_t nbytes, bool non_temporal) {
  return non_temporal ? CopyLoop<kWidth, true>(out, in, nbytes)
                      : CopyLoop<kWidth, false>(out, in, nbytes);
}

// As much as both have, in whole steps. Returns how much that was.
template <int kWidth, bool kNonTemporalFirst, bool kNonTemporalSecond>
DDL_INLINE int64_t CopyBothLoop(const Copy& first, const Copy& second) {
  using V = typename VectorOf<char, kWidth>::Type;
  constexpr int kVectors = 4;
  char* const outs[] = {static_cast<char*>(first.out), static_cast<char*>(second.out)};
  const char* const ins[] = {static_cast<const char*>(first.in),
                             static_cast<const char*>(second.in)};
  const int64_t nbytes = std::min(first.nbytes, second.nbytes);
  int64_t i = 0;
  for (; i + kVectors * kWidth <= nbytes; i += kVectors * kWidth) {
    Prefetch<kVectors * kWidth>(ins[0] + i);
    V parts[2][kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) {
      const int which = v / kVectors;
      parts[which][v % kVectors] =
          *reinterpret_cast<const V*>(ins[which] + i + v % kVectors * kWidth);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Store<kNonTemporalFirst>(outs[0] + i + v * kWidth, parts[0][v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Store<kNonTemporalSecond>(outs[1] + i + v * kWidth, parts[1][v]);
    }
  }
  return i;
}

template <int kWidth>
DDL_INLINE int64_t CopyBothAny(const Copy& first, const Copy& second) {
  if (first.non_temporal) {
    return second.non_temporal ? CopyBothLoop<kWidth, true, true>(first, second)
                               : CopyBothLoop<kWidth, true, false>(first, second);
  }
  return second.non_temporal ? CopyBothLoop<kWidth, false, true>(first, second)
                             : CopyBothLoop<kWidth, false, false>(first, second);
}

void SumPlain(const Sum& sum) { SumAny<16>(sum); }
void CopyPlain(char* out, const char* in, int64_t nbytes, bool non_temporal) {
  CopyAny<16>(out, in, nbytes, non_temporal);
}
int64_t CopyBothPlain(const Copy& first, const Copy& second) {
  return CopyBothAny<16>(first, second);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void SumAvx2(const Sum& sum) { SumAny<32>(sum); }
[[gnu::target("avx512f")]] void SumAvx512(const Sum& sum) { SumAny<64>(sum); }

[[gnu::target("avx2")]] void CopyAvx2(char* out, const char* in, int64_t nbytes,
                                      bool non_temporal) {
  CopyAny<32>(out, in, nbytes, non_temporal);
}
[[gnu::target("avx512f")]] void CopyAvx512(char* out, const char* in, int64_t nbytes,
                                           bool non_temporal) {
  CopyAny<64>(out, in, nbytes, non_temporal);
}

[[gnu::target("avx2")]] int64_t CopyBothAvx2(const Copy& first, const Copy& second) {
  return CopyBothAny<32>(first, second);
}
[[gnu::target("avx512f")]] int64_t CopyBothAvx512(const Copy& first, const Copy& second) {
  return CopyBothAny<64>(first, second);
}
#endif

struct Loops {
  const char* name;
  bool (*runs_here)();
  void (*sum)(const Sum&);
  void (*copy)(char*, const char*, int64_t, bool);
  int64_t (*copy_both)(const Copy&, const Copy&);
};

// The best first.
constexpr Loops kLoops[] = {
#if defined(__x86_64__)
    {"avx512f", [] { return __builtin_cpu_supports("avx512f") > 0; }, SumAvx512, CopyAvx512,
     CopyBothAvx512},
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); },
     SumAvx2, CopyAvx2, CopyBothAvx2},
    {"sse2", [] { return true; }, SumPlain, CopyPlain, CopyBothPlain},
#elif defined(__aarch64__)
    {"neon", [] { return true; }, SumPlain, CopyPlain, CopyBothPlain},
#else
    {"portable", [] { return true; }, SumPlain, CopyPlain, CopyBothPlain},
#endif
};

const Loops*& Chosen() {
  static const Loops* chosen = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    return std::find_if(std::begin(kLoops), std::end(kLoops),
                        [](const Loops& loops) { return loops.runs_here(); });
  }();
  return chosen;
}

// These stores fault where they are not aligned to the vector.
bool CanStoreNonTemporal(const void* out) { return reinterpret_cast<uintptr_t>(out) % 64 == 0; }

}  // namespace

void Compute(const Sum& sum) {
  if (sum.op != ReduceOp::kSum || !HasSumLoop(sum.dtype) ||
      SumsWide(sum.dtype, {sum.op, sum.divisor})) {
    return Fold(sum);
  }
  Sum possible = sum;
  possible.non_temporal = sum.non_temporal && CanStoreNonTemporal(sum.out);
  possible.non_temporal_copy = sum.non_temporal_copy && CanStoreNonTemporal(sum.copy);
  Chosen()->sum(possible);
}

void CopyBytes(void* out, const void* in, int64_t nbytes, bool non_temporal) {
  if (nbytes == 0) return;
  char* to = static_cast<char*>(out);
  const char* from = static_cast<const char*>(in);
  if (non_temporal && !CanStoreNonTemporal(to)) {
    const int64_t head = std::min<int64_t>(nbytes, 64 - reinterpret_cast<uintptr_t>(to) % 64);
    std::memcpy(to, from, head);
    to += head;
    from += head;
    nbytes -= head;
  }
  Chosen()->copy(to, from, nbytes, non_temporal);
}

void CopyBoth(const Copy& first, const Copy& second) {
  int64_t done = 0;
  if ((!first.non_temporal || CanStoreNonTemporal(first.out)) &&
      (!second.non_temporal || CanStoreNonTemporal(second.out))) {
    done = Chosen()->copy_both(first, second);
  }
  for (const Copy& rest : {first, second}) {
    CopyBytes(static_cast<char*>(rest.out) + done, static_cast<const char*>(rest.in) + done,
              rest.nbytes - done, rest.non_temporal);
  }
}

void FenceNonTemporalStores() {
#if defined(__x86_64__)
  _mm_sfence();  // elsewhere they are plain stores, which the next store that releases orders
#endif
}

const char* VectorInstructions() { return Chosen()->name; }

bool UseVectorInstructions(const std::string& name) {
  for (const Loops& loops : kLoops) {
    if (name != loops.name || !loops.runs_here()) continue;
    Chosen() = &loops;
    return true;
  }
  return false;
}

}  // namespace ddl
