#include "core/half.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For the loops over bfloat16, which the compiler turns into vectors at this level only.
#pragma GCC optimize("O3")

namespace ddl {
namespace {

template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Exponents and fractions in float32's bits.
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kQuiet = 0x00400000u;

float FromFloat16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  // Read as float32, the number is 2^112 too small: exponents count from -15, not from -127. The
  // product is exact, also for subnormal numbers.
  const float scaled = BitCast<float>(magnitude) * 0x1p112f;
  uint32_t bits = BitCast<uint32_t>(scaled);
  if (scaled >= 0x1p16f) bits |= kInfinity;  // float16's largest exponent: infinity or NaN
  if (bits > kInfinity) bits |= kQuiet;
  return BitCast<float>(sign | bits);
}

uint16_t ToFloat16(float number) {
  uint32_t bits = BitCast<uint32_t>(number);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > kInfinity) return static_cast<uint16_t>(sign | 0x7e00u | (bits >> 13 & 0x3ffu));
  if (bits >= BitCast<uint32_t>(65520.0f)) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < BitCast<uint32_t>(0x1p-14f)) {
    // Subnormal float16: multiples of 2^-24, the spacing of float32 from 0.5 on, so that this
    // addition rounds.
    const float shifted = BitCast<float>(bits) + 0.5f;
    return static_cast<uint16_t>(sign | (BitCast<uint32_t>(shifted) - BitCast<uint32_t>(0.5f)));
  }
  // Half of the last place that stays, less one, and one more if that place is odd; a carry into
  // the exponent is what rounding up asks for.
  bits += 0xfffu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((bits - (112u << 23)) >> 13));
}

float FromBfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  return BitCast<float>((bits & 0x7fffffffu) > kInfinity ? bits | kQuiet : bits);
}

uint16_t ToBfloat16(float number) {
  const uint32_t bits = BitCast<uint32_t>(number);
  const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return static_cast<uint16_t>(((bits & 0x7fffffffu) > kInfinity ? bits | kQuiet : rounded) >> 16);
}

#if defined(__x86_64__)

// Both convert the elements that fill whole vectors and return how many those are.
__attribute__((target("avx,f16c"))) int64_t WidenVectors(const uint16_t* halves, float* floats,
                                                         int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i));
    _mm256_storeu_ps(floats + i, _mm256_cvtph_ps(packed));
  }
  return i;
}

__attribute__((target("avx,f16c"))) int64_t NarrowVectors(const float* floats, uint16_t* halves,
                                                          int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(floats + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + i), packed);
  }
  return i;
}

bool HasVectors() {
  static const bool has = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return has;
}

#elif defined(__aarch64__)

int64_t WidenVectors(const uint16_t* halves, float* floats, int64_t count) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    vst1q_f32(floats + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + i))));
  }
  return i;
}

int64_t NarrowVectors(const float* floats, uint16_t* halves, int64_t count) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    vst1_u16(halves + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(floats + i))));
  }
  return i;
}

bool HasVectors() { return true; }

#else

int64_t WidenVectors(const uint16_t*, float*, int64_t) { return 0; }
int64_t NarrowVectors(const float*, uint16_t*, int64_t) { return 0; }
bool HasVectors() { return false; }

#endif

}  // namespace

bool IsHalf(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }

void Widen(const void* halves, float* floats, int64_t count, DType dtype) {
  const uint16_t* from = static_cast<const uint16_t*>(halves);
  if (dtype == DType::kBfloat16) {
    for (int64_t i = 0; i < count; ++i) floats[i] = FromBfloat16(from[i]);
    return;
  }
  const int64_t done = HasVectors() ? WidenVectors(from, floats, count) : 0;
  for (int64_t i = done; i < count; ++i) floats[i] = FromFloat16(from[i]);
}

void Narrow(const float* floats, void* halves, int64_t count, DType dtype) {
  uint16_t* to = static_cast<uint16_t*>(halves);
  if (dtype == DType::kBfloat16) {
    for (int64_t i = 0; i < count; ++i) to[i] = ToBfloat16(floats[i]);
    return;
  }
  const int64_t done = HasVectors() ? NarrowVectors(floats, to, count) : 0;
  for (int64_t i = done; i < count; ++i) to[i] = ToFloat16(floats[i]);
}

}  // namespace ddl
