#include "core/vector.h"

#include <emmintrin.h>

#include <cstring>
#include <type_traits>

namespace ddl {
namespace {

// The loops are written once, as templates over the vector's width, and inlined into functions that
// are compiled for one instruction set each. The library itself is compiled for plain x86-64.
#define DDL_INLINE [[gnu::always_inline]] inline

template <typename T, int kWidth>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kWidth), aligned(alignof(T)), may_alias));
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
template <typename V>
DDL_INLINE void Stream(char* out, const V& value) {
  if constexpr (sizeof(V) == 16) {
    asm volatile("movntps %1, %0" : "=m"(*reinterpret_cast<V*>(out)) : "x"(value));
  } else {
    asm volatile("vmovntps %1, %0" : "=m"(*reinterpret_cast<V*>(out)) : "v"(value));
  }
}

template <typename T, int kWidth, bool kStream, bool kCopy, bool kDivide>
DDL_INLINE void SumLoop(const Sum& sum) {
  using A = typename AdditionOf<T>::Type;
  using V = typename VectorOf<A, kWidth>::Type;
  using S = typename VectorOf<T, kWidth>::Type;
  constexpr int64_t kLanes = kWidth / sizeof(T);
  constexpr int kVectors = 4;  // at once, so that the loop over the sources costs little
  const char* const* sources = reinterpret_cast<const char* const*>(sum.sources);
  char* out = static_cast<char*>(sum.out);
  char* copy = static_cast<char*>(sum.copy);
  const T divisor = static_cast<T>(sum.divisor);
  int64_t i = 0;
  for (; i + kVectors * kLanes <= sum.count; i += kVectors * kLanes) {
    const int64_t at = i * static_cast<int64_t>(sizeof(T));
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
      if constexpr (kCopy) *reinterpret_cast<V*>(copy + at + v * kWidth) = total[v];
      if constexpr (kStream) {
        Stream(out + at + v * kWidth, total[v]);
      } else {
        *reinterpret_cast<V*>(out + at + v * kWidth) = total[v];
      }
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
    if constexpr (kCopy) std::memcpy(copy + at, &total, sizeof(A));
    std::memcpy(out + at, &total, sizeof(A));
  }
}

template <typename T, int kWidth, bool kStream, bool kCopy>
DDL_INLINE void SumDivided(const Sum& sum) {
  return sum.divisor == 1 ? SumLoop<T, kWidth, kStream, kCopy, false>(sum)
                          : SumLoop<T, kWidth, kStream, kCopy, true>(sum);
}

template <typename T, int kWidth>
DDL_INLINE void SumAs(const Sum& sum) {
  if (sum.copy == nullptr) return SumDivided<T, kWidth, false, false>(sum);
  return sum.stream ? SumDivided<T, kWidth, true, true>(sum)
                    : SumDivided<T, kWidth, false, true>(sum);
}

template <int kWidth>
DDL_INLINE void SumAny(const Sum& sum) {
  switch (sum.dtype) {
    case DType::kFloat32: return SumAs<float, kWidth>(sum);
    case DType::kFloat64: return SumAs<double, kWidth>(sum);
    case DType::kInt32: return SumAs<int32_t, kWidth>(sum);
    case DType::kInt64: return SumAs<int64_t, kWidth>(sum);
    default: return;
  }
}

template <int kWidth, bool kStream>
DDL_INLINE void CopyLoop(char* out, const char* in, int64_t nbytes) {
  using V = typename VectorOf<char, kWidth>::Type;
  int64_t i = 0;
  for (; i + 4 * kWidth <= nbytes; i += 4 * kWidth) {
    V parts[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) parts[v] = *reinterpret_cast<const V*>(in + i + v * kWidth);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      if constexpr (kStream) {
        Stream(out + i + v * kWidth, parts[v]);
      } else {
        *reinterpret_cast<V*>(out + i + v * kWidth) = parts[v];
      }
    }
  }
  std::memcpy(out + i, in + i, nbytes - i);
}

template <int kWidth>
DDL_INLINE void CopyAny(char* out, const char* in, int64_t nbytes, bool stream) {
  return stream ? CopyLoop<kWidth, true>(out, in, nbytes) : CopyLoop<kWidth, false>(out, in, nbytes);
}

void SumSse2(const Sum& sum) { SumAny<16>(sum); }
[[gnu::target("avx2")]] void SumAvx2(const Sum& sum) { SumAny<32>(sum); }
[[gnu::target("avx512f")]] void SumAvx512(const Sum& sum) { SumAny<64>(sum); }

void CopySse2(char* out, const char* in, int64_t nbytes, bool stream) {
  CopyAny<16>(out, in, nbytes, stream);
}
[[gnu::target("avx2")]] void CopyAvx2(char* out, const char* in, int64_t nbytes, bool stream) {
  CopyAny<32>(out, in, nbytes, stream);
}
[[gnu::target("avx512f")]] void CopyAvx512(char* out, const char* in, int64_t nbytes, bool stream) {
  CopyAny<64>(out, in, nbytes, stream);
}

struct Loops {
  const char* name;
  void (*sum)(const Sum&);
  void (*copy)(char*, const char*, int64_t, bool);
};

const Loops& Best() {
  static const Loops loops = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return Loops{"avx512f", SumAvx512, CopyAvx512};
    if (__builtin_cpu_supports("avx2")) return Loops{"avx2", SumAvx2, CopyAvx2};
    return Loops{"sse2", SumSse2, CopySse2};
  }();
  return loops;
}

// These stores fault where they are not aligned to the vector.
bool CanStream(const void* out) { return reinterpret_cast<uintptr_t>(out) % 64 == 0; }

}  // namespace

bool CanSum(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kInt32 ||
         dtype == DType::kInt64;
}

void Compute(const Sum& sum) {
  if (!sum.stream || CanStream(sum.out)) return Best().sum(sum);
  Sum plain = sum;
  plain.stream = false;
  Best().sum(plain);
}

void CopyBytes(void* out, const void* in, int64_t nbytes, bool stream) {
  if (nbytes == 0) return;
  Best().copy(static_cast<char*>(out), static_cast<const char*>(in), nbytes,
              stream && CanStream(out));
}

void FinishStreams() { _mm_sfence(); }

const char* VectorInstructions() { return Best().name; }

}  // namespace ddl
