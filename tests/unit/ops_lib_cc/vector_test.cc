#include "core/vector.h"

#include <cstring>

#include "check.h"
#include "values.h"

namespace {

template <typename T>
void SumsOf(int size, int64_t count, int divisor, bool in_place, bool copy, bool stream,
            int64_t offset) {
  std::vector<std::vector<T>> inputs;
  std::vector<const void*> sources;
  for (int rank = 0; rank < size; ++rank) {
    inputs.push_back(ValuesOf<T>(count, rank, size));
    // Off the vector's alignment by some elements.
    inputs.back().insert(inputs.back().begin(), offset, T{77});
  }
  for (const auto& input : inputs) sources.push_back(input.data() + offset);
  std::vector<T> out(count + offset + 64 / sizeof(T)), second(count + 1, T{77});
  T* to = out.data() + offset;
  if (stream && offset == 0) {
    while (reinterpret_cast<uintptr_t>(to) % 64 != 0) ++to;
  }
  if (in_place) to = inputs[size - 1].data() + offset;
  ddl::Sum sum;
  sum.sources = sources.data();
  sum.num_sources = size;
  sum.out = to;
  sum.copy = copy ? second.data() : nullptr;
  sum.count = count;
  sum.dtype = kDTypeOf<T>;
  sum.divisor = divisor;
  sum.stream = stream;
  ddl::Compute(sum);
  ddl::FinishStreams();
  const std::string where = "dtype " + std::string(ddl::DTypeName(kDTypeOf<T>)) + " of " +
                            std::to_string(size) + " sources";
  CheckTotal(std::vector<T>(to, to + count), size, divisor, where);
  if (copy) {
    CHECK(second[count] == T{77}, where);
    second.pop_back();
    CheckTotal(second, size, divisor, where + " (copy)");
  }
}

template <typename T>
void AllSumsOf() {
  for (const int size : {1, 2, 3, 9}) {
    for (const int64_t count : {0, 1, 3, 15, 16, 63, 64, 65, 127, 129, 1001}) {
      for (int how = 0; how < 16; ++how) {
        SumsOf<T>(size, count, how & 1 ? size + 1 : 1, how & 2, how & 4, how & 8, count % 2);
      }
    }
  }
}

TEST(SumIsExactForEveryDTypeAndLength) {
  AllSumsOf<float>();
  AllSumsOf<double>();
  AllSumsOf<int32_t>();
  AllSumsOf<int64_t>();
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
  for (const int64_t nbytes : {0, 1, 63, 64, 255, 256, 257, 4097}) {
    for (const bool stream : {false, true}) {
      for (const int offset : {0, 3}) {
        alignas(64) char out[5120] = {};
        ddl::CopyBytes(out + offset, in.data() + offset, nbytes, stream);
        ddl::FinishStreams();
        CHECK(std::memcmp(out + offset, in.data() + offset, nbytes) == 0, std::to_string(nbytes));
        CHECK(out[offset + nbytes] == 0, std::to_string(nbytes));
      }
    }
  }
}

}  // namespace
