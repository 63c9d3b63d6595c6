#include "core/vector.h"

#include <cmath>
#include <cstring>
#include <random>
#include <type_traits>

#include "check.h"
#include "core/half.h"
#include "values.h"

namespace {

template <typename T>
void SumsOf(int size, int64_t count, int divisor, bool in_place, bool copy, bool non_temporal,
            bool non_temporal_copy, int64_t offset) {
  std::vector<std::vector<T>> inputs;
  std::vector<const void*> sources;
  for (int rank = 0; rank < size; ++rank) {
    inputs.push_back(ValuesOf<T>(count, rank, size));
    // Off the vector's alignment by some elements.
    inputs.back().insert(inputs.back().begin(), offset, T{77});
  }
  for (const auto& input : inputs) sources.push_back(input.data() + offset);
  const int64_t line = 64 / sizeof(T);
  std::vector<T> out(count + offset + line), second(count + offset + line, T{77});
  T* to = out.data() + offset;
  T* to_copy = second.data() + offset;
  if (offset == 0) {
    while (reinterpret_cast<uintptr_t>(to) % 64 != 0) ++to;
    while (reinterpret_cast<uintptr_t>(to_copy) % 64 != 0) ++to_copy;
  }
  if (in_place) to = inputs[size - 1].data() + offset;
  ddl::Sum sum;
  sum.sources = sources.data();
  sum.num_sources = size;
  sum.out = to;
  sum.copy = copy ? to_copy : nullptr;
  sum.count = count;
  sum.dtype = kDTypeOf<T>;
  sum.divisor = divisor;
  sum.non_temporal = non_temporal;
  sum.non_temporal_copy = non_temporal_copy;
  sum.prefetch = static_cast<int>(count % (size + 1)) - 1;
  ddl::Compute(sum);
  ddl::FenceNonTemporalStores();
  const std::string where = "dtype " + std::string(ddl::DTypeName(kDTypeOf<T>)) + " of " +
                            std::to_string(size) + " sources";
  CheckTotal(std::vector<T>(to, to + count), size, divisor, where);
  if (copy) {
    CHECK(to_copy[count] == T{77}, where);
    CheckTotal(std::vector<T>(to_copy, to_copy + count), size, divisor, where + " (copy)");
  }
}

template <typename T>
void AllSumsOf() {
  for (const int size : {1, 2, 3, 9}) {
    for (const int64_t count : {0, 1, 3, 15, 16, 63, 64, 65, 127, 129, 1001}) {
      for (int how = 0; how < 32; ++how) {
        SumsOf<T>(size, count, how & 1 ? size + 1 : 1, how & 2, how & 4, how & 8, how & 16,
                  count % 2);
      }
    }
  }
}

// With each set of instructions that this processor has.
template <typename Function>
void WithAllInstructions(Function function) {
  const std::string best = ddl::VectorInstructions();
  for (const char* name : {"sse2", "avx2", "avx512f", "neon"}) {
    if (ddl::UseVectorInstructions(name)) {
      function(name);
    } else {
      std::printf("       not here: %s\n", name);
    }
  }
  CHECK(ddl::UseVectorInstructions(best), best);
}

TEST(SumIsExactForEveryDTypeAndLength) {
  WithAllInstructions([](const std::string&) {
    AllSumsOf<float>();
    AllSumsOf<double>();
    AllSumsOf<int32_t>();
    AllSumsOf<int64_t>();
  });
}

// One by one, wrapping around as integers without sign do: after 64 bits where it is an average.
template <typename T>
T Folded(ddl::ReduceOp op, const std::vector<std::vector<T>>& inputs, int64_t index, int divisor) {
  if constexpr (std::is_integral_v<T>) {
    if (divisor != 1) return AverageOf(inputs, index, divisor);
  }
  T total = inputs[0][index];
  for (size_t s = 1; s < inputs.size(); ++s) {
    const T next = inputs[s][index];
    if (op == ddl::ReduceOp::kMin) {
      total = next < total ? next : total;
    } else if (op == ddl::ReduceOp::kMax) {
      total = next > total ? next : total;
    } else if constexpr (std::is_integral_v<T>) {
      const uint64_t a = static_cast<uint64_t>(total), b = static_cast<uint64_t>(next);
      total = static_cast<T>(op == ddl::ReduceOp::kSum ? a + b : a * b);
    } else {
      total = op == ddl::ReduceOp::kSum ? total + next : total * next;
    }
  }
  return divisor == 1 ? total : static_cast<T>(total / static_cast<T>(divisor));
}

template <typename T>
void FoldsOf(ddl::ReduceOp op, int size, int64_t count, int divisor, int how) {
  std::mt19937_64 random(count * 10 + size);
  std::vector<std::vector<T>> inputs(size);
  for (std::vector<T>& input : inputs) {
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t bits = random() >> random() % 64;
      // No product of these is infinite, as of which one with 0 would be NaN.
      input.push_back(static_cast<T>(std::is_integral_v<T> ? bits : bits % 1000));
    }
  }
  const std::vector<std::vector<T>> before = inputs;
  std::vector<const void*> sources;
  for (const auto& input : inputs) sources.push_back(input.data());
  std::vector<T> out(count + 1, T{77}), copy(count + 1, T{77});
  ddl::Sum sum;
  sum.sources = sources.data();
  sum.num_sources = size;
  sum.out = how & 1 ? inputs[size - 1].data() : out.data();
  sum.copy = how & 2 ? copy.data() : nullptr;
  sum.count = count;
  sum.dtype = kDTypeOf<T>;
  sum.op = op;
  sum.divisor = divisor;
  sum.non_temporal = sum.non_temporal_copy = how & 4;
  ddl::Compute(sum);
  const T* got = static_cast<const T*>(sum.out);
  const std::string where = std::string(ddl::ReduceOpName(op)) + " of " +
                            ddl::DTypeName(kDTypeOf<T>) + ", " + std::to_string(count);
  for (int64_t i = 0; i < count; ++i) {
    CHECK(got[i] == Folded(op, before, i, divisor), where);
    CHECK(!(how & 2) || copy[i] == got[i], where + " (copy)");
  }
  CHECK(out[count] == T{77} && copy[count] == T{77}, where);
}

template <typename T>
void AllFoldsOf() {
  using ddl::ReduceOp;
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    for (const int size : {1, 2, 5}) {
      for (const int64_t count : {0, 1, 15, 64, 65, 300}) {
        // 200 is more than a signed byte holds.
        FoldsOf<T>(op, size, count, op == ReduceOp::kSum && size == 5 ? 200 : 1, count % 8);
      }
    }
  }
}

// All sources hold the smallest number, or the largest, or take turns, in place and with a copy.
template <typename T>
void AveragesOfLimits(const std::string& name) {
  for (const int size : {2, 3, 4, 200}) {  // more than a signed byte holds
    for (const int64_t count : {0, 1, 7, 64, 201}) {
      std::vector<std::vector<T>> inputs = LimitsOf<T>(size, count);
      const std::vector<std::vector<T>> before = inputs;
      std::vector<const void*> sources;
      for (const auto& input : inputs) sources.push_back(input.data());
      std::vector<T> copy(count + 1, T{77});
      ddl::Sum sum;
      sum.sources = sources.data();
      sum.num_sources = size;
      sum.out = inputs[size / 2].data();
      sum.copy = copy.data();
      sum.count = count;
      sum.dtype = kDTypeOf<T>;
      sum.divisor = size;
      ddl::Compute(sum);
      for (int64_t i = 0; i < count; ++i) {
        const T got = inputs[size / 2][i], want = AverageOf(before, i, size);
        CHECK(got == want && copy[i] == want,
              name + ", " + ddl::DTypeName(kDTypeOf<T>) + " of " + std::to_string(size) +
                  " sources: [" + std::to_string(i) + "] is " + std::to_string(got) + ", not " +
                  std::to_string(want));
      }
      CHECK(copy[count] == T{77}, name);
    }
  }
}

TEST(FoldIsExactForEveryOpAndDType) {
  WithAllInstructions([](const std::string&) {
    AllFoldsOf<float>();
    AllFoldsOf<double>();
    AllFoldsOf<int8_t>();
    AllFoldsOf<uint8_t>();
    AllFoldsOf<int16_t>();
    AllFoldsOf<uint16_t>();
    AllFoldsOf<int32_t>();
    AllFoldsOf<uint32_t>();
    AllFoldsOf<int64_t>();
    AllFoldsOf<uint64_t>();
  });
}

TEST(AveragesOfSmallIntegersDoNotWrapAround) {
  WithAllInstructions([](const std::string& name) {
    AveragesOfLimits<int8_t>(name);
    AveragesOfLimits<uint8_t>(name);
    AveragesOfLimits<int16_t>(name);
    AveragesOfLimits<uint16_t>(name);
    AveragesOfLimits<int32_t>(name);
    AveragesOfLimits<uint32_t>(name);
  });
}

TEST(NanIsTheSmallestAndTheLargestWhicheverRankHasIt) {
  const float nan = std::nanf("");
  WithAllInstructions([nan](const std::string& name) {
    for (const ddl::ReduceOp op : {ddl::ReduceOp::kMin, ddl::ReduceOp::kMax}) {
      for (int with = 0; with < 3; ++with) {
        std::vector<std::vector<float>> inputs(3, std::vector<float>(70, 1));
        inputs[with].assign(70, nan);
        const void* sources[] = {inputs[0].data(), inputs[1].data(), inputs[2].data()};
        std::vector<float> out(70);
        ddl::Sum sum;
        sum.sources = sources;
        sum.num_sources = 3;
        sum.out = out.data();
        sum.count = 70;
        sum.op = op;
        ddl::Compute(sum);
        for (const float one : out) CHECK(std::isnan(one), name);
      }
    }
  });
}

TEST(NeutralElementsChangeNothing) {
  using ddl::DType;
  using ddl::ReduceOp;
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    for (const DType dtype :
         {DType::kFloat32, DType::kFloat64, DType::kInt32, DType::kInt64, DType::kFloat16,
          DType::kBfloat16, DType::kInt8, DType::kUint8, DType::kInt16, DType::kUint16,
          DType::kUint32, DType::kUint64}) {
      const int64_t count = 33, nbytes = count * static_cast<int64_t>(ddl::DTypeSize(dtype));
      // Of halves, which may not be signalling NaNs, and of the rest: all numbers.
      std::vector<char> values(nbytes), neutral(nbytes), out(nbytes);
      for (int64_t i = 0; i < nbytes; ++i) values[i] = static_cast<char>(i * 37 % 120);
      ddl::FillNeutral(neutral.data(), count, dtype, op);
      for (const bool first : {true, false}) {
        const void* sources[] = {first ? neutral.data() : values.data(),
                                 first ? values.data() : neutral.data()};
        ddl::Sum sum;
        sum.sources = sources;
        sum.num_sources = 2;
        sum.out = out.data();
        sum.count = count;
        sum.dtype = dtype;
        sum.op = op;
        ddl::Compute(sum);
        CHECK(out == values, std::string(ddl::ReduceOpName(op)) + " of " + ddl::DTypeName(dtype));
      }
    }
  }
}

// Halves one by one, as core/half defines them. `free` where the sum has two NaNs to choose from.
uint16_t HalfSum(const std::vector<const uint16_t*>& sources, int64_t index, int divisor,
                 ddl::DType dtype, bool* free) {
  float total = 0, next = 0;
  ddl::Widen(sources[0] + index, &total, 1, dtype);
  *free = false;
  for (size_t s = 1; s < sources.size(); ++s) {
    ddl::Widen(sources[s] + index, &next, 1, dtype);
    *free = *free || (std::isnan(total) && std::isnan(next));
    total += next;
  }
  if (divisor != 1) total /= static_cast<float>(divisor);
  uint16_t half = 0;
  ddl::Narrow(&total, &half, 1, dtype);
  return half;
}

bool IsNan(uint16_t half, ddl::DType dtype) {
  float number = 0;
  ddl::Widen(&half, &number, 1, dtype);
  return std::isnan(number);
}

// `how`: bits for in place, copy, non_temporal, non_temporal_copy. The inputs are all halves, each
// source in another order.
void HalfSumsOf(ddl::DType dtype, int size, int64_t count, int divisor, int how,
                const std::string& where) {
  std::vector<std::vector<uint16_t>> inputs(size);
  std::vector<const uint16_t*> originals;
  for (int s = 0; s < size; ++s) {
    for (int64_t i = 0; i < count; ++i) {
      inputs[s].push_back(static_cast<uint16_t>(i * (1 + 40502 * s) + 12345 * s));
    }
  }
  const std::vector<std::vector<uint16_t>> before = inputs;
  std::vector<const void*> sources;
  for (int s = 0; s < size; ++s) {
    sources.push_back(inputs[s].data());
    originals.push_back(before[s].data());
  }
  std::vector<uint16_t> out(count + 64, 77), second(count + 64, 77);
  uint16_t* to = out.data();
  uint16_t* copy = second.data();
  while (reinterpret_cast<uintptr_t>(to) % 64 != 0) ++to;
  while (reinterpret_cast<uintptr_t>(copy) % 64 != 0) ++copy;
  ddl::Sum sum;
  sum.sources = sources.data();
  sum.num_sources = size;
  sum.out = how & 1 ? inputs[size - 1].data() : to;
  sum.copy = how & 2 ? copy : nullptr;
  sum.count = count;
  sum.dtype = dtype;
  sum.divisor = divisor;
  sum.non_temporal = how & 4;
  sum.non_temporal_copy = how & 8;
  sum.prefetch = static_cast<int>(count % (size + 1)) - 1;
  ddl::Compute(sum);
  ddl::FenceNonTemporalStores();
  const uint16_t* got = static_cast<const uint16_t*>(sum.out);
  for (int64_t i = 0; i < count; ++i) {
    bool free = false;
    const uint16_t want = HalfSum(originals, i, divisor, dtype, &free);
    CHECK(free ? IsNan(got[i], dtype) : got[i] == want,
          where + " " + ddl::DTypeName(dtype) + " of " + std::to_string(size) + " sources: [" +
              std::to_string(i) + "] of " + std::to_string(count) + " is " +
              std::to_string(got[i]) + ", not " + std::to_string(want));
    if (how & 2) CHECK(copy[i] == got[i], where);
  }
  if (!(how & 1)) CHECK(to[count] == 77, where);
  CHECK(copy[count] == 77, where);
}

TEST(HalvesHaveTheBitsOfCoreHalf) {
  WithAllInstructions([](const std::string& name) {
    for (const ddl::DType dtype : {ddl::DType::kFloat16, ddl::DType::kBfloat16}) {
      for (const int size : {1, 2, 3, 5}) {
        for (const int divisor : {1, size + 1}) HalfSumsOf(dtype, size, 65536, divisor, 2, name);
      }
      for (const int64_t count : {0, 1, 31, 32, 33, 63, 65, 129, 1001}) {
        for (int how = 0; how < 16; ++how) HalfSumsOf(dtype, 3, count, 3, how, name);
      }
    }
  });
}

TEST(SumAddsInTheOrderOfItsSources) {
  // 1e8 + 1 is 1e8 in float32, so the order shows.
  const std::vector<float> large(100, 1e8f), one(100, 1.0f), minus(100, -1e8f);
  const std::pair<std::vector<const void*>, float> cases[] = {
      {{large.data(), minus.data(), one.data()}, 1.0f},
      {{large.data(), one.data(), minus.data()}, 0.0f},
  };
  for (const auto& [sources, want] : cases) {
    std::vector<float> out(100);
    ddl::Sum sum;
    sum.sources = sources.data();
    sum.num_sources = 3;
    sum.out = out.data();
    sum.count = 100;
    ddl::Compute(sum);
    for (const float value : out) CHECK(value == want, std::to_string(value));
  }
}

TEST(IntegersWrapAround) {
  const std::vector<int32_t> most(70, 0x7fffffff), two(70, 2);
  std::vector<int32_t> out(70);
  const void* sources[] = {most.data(), two.data()};
  ddl::Sum sum;
  sum.sources = sources;
  sum.num_sources = 2;
  sum.out = out.data();
  sum.count = 70;
  sum.dtype = ddl::DType::kInt32;
  ddl::Compute(sum);
  for (const int32_t value : out) CHECK(value == -0x7fffffff, std::to_string(value));
}

TEST(CopyBytesCopiesThoseAndNoMore) {
  std::vector<char> in(5000);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<char>(i * 7 + i / 256);
  WithAllInstructions([&](const std::string& name) {
    for (const int64_t nbytes : {0, 1, 60, 61, 63, 64, 255, 256, 257, 4097}) {
      for (const bool non_temporal : {false, true}) {
        for (const int offset : {0, 3}) {
          alignas(64) char out[5120] = {};
          ddl::CopyBytes(out + offset, in.data() + offset, nbytes, non_temporal);
          ddl::FenceNonTemporalStores();
          const std::string where = name + ": " + std::to_string(nbytes);
          CHECK(std::memcmp(out + offset, in.data() + offset, nbytes) == 0, where);
          CHECK(out[offset + nbytes] == 0, where);
        }
      }
    }
  });
}

TEST(CopyBothCopiesBothAndNoMore) {
  std::vector<char> in(10000);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<char>(i * 7 + i / 256);
  const std::vector<int64_t> lengths = {0, 1, 64, 255, 256, 300, 1024, 4097};
  WithAllInstructions([&](const std::string& name) {
    for (const int64_t first : lengths) {
      for (const int64_t second : lengths) {
        // Bits: both streams, and whether both outputs are off the line that a non_temporal needs.
        for (int how = 0; how < 16; ++how) {
          alignas(64) char outs[2][5120] = {};
          char* to_first = outs[0] + (how & 4 ? 3 : 0);
          char* to_second = outs[1] + (how & 8 ? 5 : 0);
          ddl::CopyBoth({to_first, in.data() + 1, first, (how & 1) != 0},
                        {to_second, in.data() + 5000, second, (how & 2) != 0});
          ddl::FenceNonTemporalStores();
          const std::string where = name + ": " + std::to_string(first) + " and " +
                                    std::to_string(second) + ", " + std::to_string(how);
          CHECK(std::memcmp(to_first, in.data() + 1, first) == 0, where);
          CHECK(std::memcmp(to_second, in.data() + 5000, second) == 0, where);
          CHECK(to_first[first] == 0 && to_second[second] == 0, where);
        }
      }
    }
  });
}

}  // namespace
