#include "algorithms/pieces_allreduce.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <random>

#include "ranks.h"
#include "values.h"

namespace {

constexpr int64_t kPiece = ddl::HostGroup::kPieceBytes;

template <typename T>
void AllReduceOnce(ddl::HostGroup& group, int64_t count, bool in_place, int divisor) {
  std::vector<T> values = ValuesOf<T>(count, group.rank(), group.size());
  std::vector<T> results(count);
  T* out = in_place ? values.data() : results.data();
  const ddl::Status status =
      ddl::AllReduceInPieces(&group, values.data(), out, count, kDTypeOf<T>, divisor);
  const std::string where = "rank " + std::to_string(group.rank()) + " of " +
                            std::to_string(group.size()) + ", " + ddl::DTypeName(kDTypeOf<T>);
  CHECK(status.ok(), where + ": " + status.message());
  CheckTotal(in_place ? values : results, group.size(), divisor, where);
  if (!in_place) CHECK(values == ValuesOf<T>(count, group.rank(), group.size()), where);
}

template <typename T>
void AllReduceCounts(ddl::HostGroup& group) {
  const int64_t piece = kPiece / sizeof(T);
  for (const int64_t count :
       {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{1000}, piece / 4 - 1, piece / 4, piece / 4 + 1,
        4 * piece - 1, 4 * piece + 1}) {
    AllReduceOnce<T>(group, count, count % 2 == 0, 1);
    AllReduceOnce<T>(group, count, count % 2 != 0, group.size());
  }
}

TEST(AllReduceIsExactOnThreads) {
  for (int size = 1; size <= 9; ++size) {
    RunThreads(size, [](ddl::HostGroup& group) {
      AllReduceCounts<float>(group);
      if (group.size() > 4) return;
      AllReduceCounts<double>(group);
      AllReduceCounts<int32_t>(group);
      AllReduceCounts<int64_t>(group);
    });
  }
}

TEST(AllReduceIsExactOnProcesses) {
  for (const int size : {2, 3, 5}) {
    RunProcesses(size, [](ddl::HostGroup& group) {
      AllReduceCounts<float>(group);
      AllReduceCounts<int64_t>(group);
    });
  }
}

TEST(LargeOutputsThatArePastTheCachesAreExact) {
  RunThreads(2, [](ddl::HostGroup& group) { AllReduceOnce<float>(group, 3'000'017, false, 2); });
}

TEST(BitsAreThoseOfRankOrderWhateverTheTiming) {
  constexpr int kSize = 4;
  constexpr int64_t kCount = 150'001;
  // Magnitudes over 12 decades, so that another order gives other bits.
  std::vector<std::vector<float>> inputs(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    std::mt19937 random(100 + rank);
    std::uniform_real_distribution<float> mantissa(-1, 1), exponent(-6, 6);
    for (int64_t i = 0; i < kCount; ++i) {
      inputs[rank].push_back(mantissa(random) * std::pow(10.0f, exponent(random)));
    }
  }
  std::vector<float> want = inputs[0];
  for (int rank = 1; rank < kSize; ++rank) {
    for (int64_t i = 0; i < kCount; ++i) want[i] += inputs[rank][i];
  }
  RunThreads(kSize, [&](ddl::HostGroup& group) {
    std::mt19937 random(group.rank());
    for (int run = 0; run < 10; ++run) {
      std::vector<float> out(kCount);
      usleep(random() % 3000);
      const ddl::Status status = ddl::AllReduceInPieces(&group, inputs[group.rank()].data(),
                                                        out.data(), kCount,
                                                        ddl::DType::kFloat32, 1);
      CHECK(status.ok(), status.message());
      CHECK(std::memcmp(out.data(), want.data(), kCount * 4) == 0, "other bits");
    }
  });
}

}  // namespace
