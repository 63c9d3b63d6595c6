#include "algorithms/pieces.h"

#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "algorithms/store_choice.h"
#include "core/half.h"
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
  if (!in_place) CHECK(Same(values, ValuesOf<T>(count, group.rank(), group.size())), where);
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
  RunThreads(2, [](ddl::HostGroup& group) { AllReduceOnce<float>(group, 5'000'017, false, 2); });
}

TEST(BitsAreThoseOfRankOrderWhateverTheTimingAndTheStores) {
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
      ddl::StoreChoice(&group).Use((run + group.rank()) % 3 == 0
                                       ? ddl::StoreChoice::Stores::kNonTemporal
                                       : ddl::StoreChoice::Stores::kCached);
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

// Tensors of a group lie in memory of their own: what one has at its place another must not get.
template <typename T>
void GroupOnce(ddl::HostGroup& group, const std::vector<int64_t>& counts, int divisor) {
  const int rank = group.rank(), size = group.size();
  std::vector<std::vector<T>> ins, outs;
  std::vector<ddl::TensorSpan> tensors;
  for (const int64_t count : counts) {
    ins.push_back(ValuesOf<T>(count, rank, size));
    outs.emplace_back(count);
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    const bool in_place = i % 3 == 1;
    tensors.push_back({ins[i].data(), in_place ? ins[i].data() : outs[i].data(), counts[i]});
  }
  const ddl::Status status = ddl::AllReduceInPieces(&group, tensors, kDTypeOf<T>, divisor);
  const std::string where = "a group on rank " + std::to_string(rank) + " of " +
                            std::to_string(size) + ", " + ddl::DTypeName(kDTypeOf<T>);
  CHECK(status.ok(), where + ": " + status.message());
  for (size_t i = 0; i < counts.size(); ++i) {
    CheckTotal(i % 3 == 1 ? ins[i] : outs[i], size, divisor, where);
    if (i % 3 != 1) CHECK(Same(ins[i], ValuesOf<T>(counts[i], rank, size)), where);
  }
}

void GroupsOnce(ddl::HostGroup& group) {
  const int64_t piece = kPiece / 4;
  const std::vector<std::vector<int64_t>> groups = {
      {},
      {0, 0},
      {1, 1, 1, 1, 1, 1, 1},
      {16, 0, 17, 15, 1, 33, 1000},                          // ends at lines, and not
      {3 * piece + 1, 5, 2 * piece, 7, 0, piece - 3, 64, 1},  // small ones between large ones
  };
  for (const std::vector<int64_t>& counts : groups) {
    GroupOnce<float>(group, counts, group.size());
    GroupOnce<double>(group, counts, 1);
    GroupOnce<int32_t>(group, counts, 1);
  }
}

TEST(TensorsOfAGroupShareOneSequenceOfPieces) {
  for (int size = 1; size <= 5; ++size) RunThreads(size, GroupsOnce);
  RunProcesses(2, GroupsOnce);
  for (const auto stores :
       {ddl::StoreChoice::Stores::kCached, ddl::StoreChoice::Stores::kNonTemporal}) {
    RunThreads(2, [stores](ddl::HostGroup& group) {
      ddl::StoreChoice(&group).Use(stores);
      GroupsOnce(group);
      // So much that outputs go past the caches.
      GroupOnce<float>(group, {1'500'007, 100, 2'900'001, 33, 70'001, 31}, 2);
    });
  }
}

TEST(BitsOfATensorDoNotDependOnItsGroup) {
  constexpr int64_t kCount = 70'001;
  std::vector<std::vector<float>> inputs(3);
  for (int rank = 0; rank < 3; ++rank) {
    std::mt19937 random(rank);
    std::uniform_real_distribution<float> mantissa(-1, 1), exponent(-6, 6);
    for (int64_t i = 0; i < kCount; ++i) {
      inputs[rank].push_back(mantissa(random) * std::pow(10.0f, exponent(random)));
    }
  }
  RunThreads(3, [&](ddl::HostGroup& group) {
    const float* mine = inputs[group.rank()].data();
    std::vector<float> alone(kCount), together(kCount), other(12'345);
    ddl::Status status =
        ddl::AllReduceInPieces(&group, mine, alone.data(), kCount, ddl::DType::kFloat32, 3);
    CHECK(status.ok(), status.message());
    const std::vector<ddl::TensorSpan> tensors = {{other.data(), other.data(), 12'345},
                                                  {mine, together.data(), kCount}};
    status = ddl::AllReduceInPieces(&group, tensors, ddl::DType::kFloat32, 3);
    CHECK(status.ok(), status.message());
    CHECK(std::memcmp(alone.data(), together.data(), kCount * 4) == 0, "other bits");
  });
}

// Sums of these are exact in both half types for up to 4 ranks.
int64_t HalfValueOf(int64_t index, int rank) { return index % 61 - 30 + rank; }

std::vector<uint16_t> HalvesOf(const std::vector<float>& floats, ddl::DType dtype) {
  std::vector<uint16_t> halves(floats.size());
  ddl::Narrow(floats.data(), halves.data(), static_cast<int64_t>(floats.size()), dtype);
  return halves;
}

void HalvesOnce(ddl::HostGroup& group) {
  for (const ddl::DType dtype : {ddl::DType::kFloat16, ddl::DType::kBfloat16}) {
    for (const int64_t count : {int64_t{1}, int64_t{33}, kPiece + 3}) {
      std::vector<float> mine(count), wanted(count);
      for (int64_t i = 0; i < count; ++i) {
        mine[i] = static_cast<float>(HalfValueOf(i, group.rank()));
        int64_t total = 0;
        for (int rank = 0; rank < group.size(); ++rank) total += HalfValueOf(i, rank);
        wanted[i] = static_cast<float>(total) / static_cast<float>(group.size());
      }
      std::vector<uint16_t> values = HalvesOf(mine, dtype);
      const ddl::Status status = ddl::AllReduceInPieces(&group, values.data(), values.data(),
                                                        count, dtype, group.size());
      CHECK(status.ok(), status.message());
      CHECK(values == HalvesOf(wanted, dtype), std::to_string(count));
    }
  }
}

TEST(HalvesTravelAsTheyAre) {
  for (int size = 1; size <= 4; ++size) RunThreads(size, HalvesOnce);
}

// Elements that each rank owns. Uneven, some none, and of one alone.
std::vector<std::vector<int64_t>> SharesOf(int size) {
  const int64_t piece = kPiece / sizeof(float);
  std::vector<std::vector<int64_t>> all(5, std::vector<int64_t>(size, 0));
  for (int rank = 0; rank < size; ++rank) {
    all[1][rank] = rank + 1;
    all[2][rank] = rank % 2 == 0 ? 0 : 1001 * rank;
    all[3][rank] = rank == size - 1 ? 3 * piece + 5 : rank == 0 ? piece : 7;
  }
  all[4][size / 2] = piece + 1;
  return all;
}

std::vector<int64_t> BytesOf(const std::vector<int64_t>& counts) {
  std::vector<int64_t> nbytes;
  for (const int64_t count : counts) nbytes.push_back(count * static_cast<int64_t>(sizeof(float)));
  return nbytes;
}

struct Share {
  Share(const std::vector<int64_t>& counts, int rank)
      : begin(std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0})),
        end(begin + counts[rank]),
        total(std::accumulate(counts.begin(), counts.end(), int64_t{0})) {}
  int64_t begin, end, total;
};

ddl::Status ReduceScatter(ddl::HostGroup& group, const float* in, float* out,
                          const std::vector<int64_t>& counts) {
  std::vector<ddl::Range> shares;
  int64_t end = 0;
  for (const int64_t nbytes : BytesOf(counts)) {
    shares.push_back({end, end + nbytes});
    end += nbytes;
  }
  const ddl::TensorList tensors({{in, nullptr, end / 4}}, 4);
  return ddl::ReduceScatterInPieces(&group, tensors, shares, out, ddl::DType::kFloat32,
                                    group.size());
}

void ReduceScatterOnce(ddl::HostGroup& group, const std::vector<int64_t>& counts, bool in_place) {
  const Share share(counts, group.rank());
  std::vector<float> values = ValuesOf<float>(share.total, group.rank(), group.size());
  std::vector<float> own(share.end - share.begin);
  float* out = in_place ? values.data() + share.begin : own.data();
  const ddl::Status status = ReduceScatter(group, values.data(), out, counts);
  CHECK(status.ok(), status.message());
  std::vector<float> want = ValuesOf<float>(share.total, group.rank(), group.size());
  const std::string where = "a share of rank " + std::to_string(group.rank());
  CheckTotals(out, share.end - share.begin, share.begin, group.size(), group.size(), where);
  if (in_place) std::copy(out, out + (share.end - share.begin), want.begin() + share.begin);
  CHECK(Same(values, want), "the input is untouched");
}

void AllGatherOnce(ddl::HostGroup& group, const std::vector<int64_t>& counts, bool in_place) {
  const Share share(counts, group.rank());
  const std::vector<float> own =
      ValuesOf<float>(share.end - share.begin, group.rank(), group.size(), share.begin);
  std::vector<float> out(share.total + 1, 77.0f);
  const float* in = own.data();
  if (in_place) {
    std::copy(own.begin(), own.end(), out.begin() + share.begin);
    in = out.data() + share.begin;
  }
  const ddl::Status status =
      ddl::AllGatherInPieces(&group, in, out.data(), BytesOf(counts));
  CHECK(status.ok(), status.message());
  for (int rank = 0; rank < group.size(); ++rank) {
    const Share theirs(counts, rank);
    const std::vector<float> got(out.begin() + theirs.begin, out.begin() + theirs.end);
    CHECK(Same(got, ValuesOf<float>(theirs.end - theirs.begin, rank, group.size(), theirs.begin)),
          "the share of rank " + std::to_string(rank));
  }
  CHECK(out[share.total] == 77.0f, "nothing behind the end");
}

std::vector<char> CharsOf(int64_t nbytes) {
  return Repeated<char>(0, nbytes, [](int64_t index) { return index % kPeriod % 251 + 1; });
}

void BroadcastOnce(ddl::HostGroup& group, const std::vector<char>& values, int root) {
  const int64_t nbytes = static_cast<int64_t>(values.size());
  std::vector<char> buffer(nbytes + 1, static_cast<char>(group.rank()));
  if (group.rank() == root) std::copy(values.begin(), values.end(), buffer.begin());
  const ddl::Status status = ddl::BroadcastInPieces(&group, buffer.data(), nbytes, root);
  CHECK(status.ok(), status.message());
  CHECK(std::equal(values.begin(), values.end(), buffer.begin()),
        "all " + std::to_string(nbytes) + " bytes of rank " + std::to_string(root));
  CHECK(buffer[nbytes] == static_cast<char>(group.rank()), "nothing behind the end");
}

void SharesOnce(ddl::HostGroup& group) {
  for (const std::vector<int64_t>& counts : SharesOf(group.size())) {
    for (const bool in_place : {false, true}) {
      ReduceScatterOnce(group, counts, in_place);
      AllGatherOnce(group, counts, in_place);
    }
  }
  for (const int64_t nbytes : {int64_t{0}, int64_t{1}, int64_t{4097}, kPiece, 9 * kPiece - 3}) {
    const std::vector<char> values = CharsOf(nbytes);
    for (int root = 0; root < group.size(); ++root) BroadcastOnce(group, values, root);
  }
  // What one leaves behind must not lead the next astray.
  AllReduceOnce<float>(group, 4 * kPiece / 4 + 1, true, 1);
}

TEST(SharesAreScatteredAndGatheredOnThreads) {
  for (int size = 1; size <= 9; ++size) RunThreads(size, SharesOnce);
}

TEST(SharesAreScatteredAndGatheredOnProcesses) {
  for (const int size : {2, 3}) RunProcesses(size, SharesOnce);
}

// What goes between hosts: fragments of the shares, of tensors that end anywhere.
void FragmentsOnce(ddl::HostGroup& group) {
  const int rank = group.rank(), size = group.size();
  const std::vector<int64_t> counts = {1, 70'001, 16, 0, 3, 33, 150'000, 7, 7};
  std::vector<std::vector<float>> ins, outs;
  std::vector<ddl::TensorSpan> spans;
  for (const int64_t count : counts) {
    ins.push_back(ValuesOf<float>(count, rank, size));
    outs.emplace_back(count);
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    spans.push_back({ins[i].data(), i % 2 == 0 ? outs[i].data() : ins[i].data(), counts[i]});
  }
  const ddl::TensorList tensors(spans, 4);
  const std::vector<ddl::Range> shares = ddl::SplitAtCacheLines({0, tensors.nbytes()}, size);
  constexpr int64_t kFragment = 100 * 1024;
  for (int64_t first = 0; first < shares[0].count(); first += kFragment) {
    std::vector<ddl::Range> fragment = shares;
    for (ddl::Range& one : fragment) {
      one.begin = std::min(one.begin + first, one.end);
      one.end = std::min(one.begin + kFragment, one.end);
    }
    const int64_t count = fragment[rank].count() / 4;
    std::vector<float> own(count + 1, 77.0f);
    ddl::Status status = ddl::ReduceScatterInPieces(&group, tensors, fragment, own.data(),
                                                    ddl::DType::kFloat32, 1);
    CHECK(status.ok(), status.message());
    CHECK(own[count] == 77.0f, "nothing behind the end");
    std::vector<bool> covered(count, false);
    tensors.ForEach(fragment[rank].begin, count * 4,
                    [&](const char*, char*, int64_t at, int64_t n) {
                      std::fill_n(covered.begin() + at / 4, n / 4, true);
                    });
    for (int64_t i = 0; i < count; ++i) {
      if (!covered[i]) CHECK(own[i] == 0, "zeros between tensors");
      own[i] = -own[i];
    }
    status = ddl::AllGatherInPieces(&group, tensors, fragment, own.data());
    CHECK(status.ok(), status.message());
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    std::vector<float> got = i % 2 == 0 ? outs[i] : ins[i];
    for (float& value : got) value = -value;
    CheckTotal(got, size, 1, "fragments");
  }
}

TEST(FragmentsOfSharesAreScatteredAndGathered) {
  for (int size = 1; size <= 5; ++size) RunThreads(size, FragmentsOnce);
}

// Ranks may differ too: the choice reaches them at different times.
TEST(AreasHoldTheSameWhateverStoresWriteThem) {
  using Stores = ddl::StoreChoice::Stores;
  for (const auto& [even, odd] : {std::pair{Stores::kCached, Stores::kCached},
                                  std::pair{Stores::kNonTemporal, Stores::kNonTemporal},
                                  std::pair{Stores::kCached, Stores::kNonTemporal}}) {
    const auto all = [even = even, odd = odd](ddl::HostGroup& group) {
      ddl::StoreChoice(&group).Use(group.rank() % 2 == 0 ? even : odd);
      AllReduceCounts<float>(group);
      AllReduceCounts<int64_t>(group);
      HalvesOnce(group);
      SharesOnce(group);
    };
    RunThreads(3, all);
    RunProcesses(2, all);
  }
}

TEST(AllRanksFollowTheChoiceForThatKindAndSize) {
  RunThreads(3, [](ddl::HostGroup& group) {
    constexpr auto kKind = ddl::StoreChoice::kAllReduce;
    constexpr int64_t kBytes = 1 << 20;
    ddl::StoreChoice stores(&group);
    for (int run = 0; run < 20 && stores.chooses(); ++run) {
      stores.Tune(kKind, kBytes, stores.UsesNonTemporal(kKind, kBytes) ? 1 : 3);
    }
    AllReduceOnce<float>(group, 10, true, 1);  // none goes on before that one has chosen
    CHECK(stores.UsesNonTemporal(kKind, kBytes), "the faster one");
    CHECK(stores.UsesNonTemporal(kKind, 4 * kBytes - 1), "of the same range");
    CHECK(!stores.UsesNonTemporal(kKind, 4 * kBytes), "of the next range");
    CHECK(!stores.UsesNonTemporal(kKind, kBytes - 1), "of the one before");
    CHECK(!stores.UsesNonTemporal(ddl::StoreChoice::kBroadcast, kBytes), "of another kind");
    stores.Use(ddl::StoreChoice::Stores::kCached);
    CHECK(!stores.UsesNonTemporal(kKind, kBytes), "what the rank was told");
  });
}

TEST(StoresAreChosenAnewWithinATensor) {
  // 64 pieces are four measurements: the window after which the other stores are tried.
  static_assert(ddl::Tuner::kWindow == 4);
  constexpr int64_t kBytes = 64 * kPiece;
  RunThreads(2, [](ddl::HostGroup& group) {
    AllReduceOnce<float>(group, kBytes / 4, false, 1);
    const ddl::StoreChoice stores(&group);
    if (stores.chooses()) {
      CHECK(stores.UsesNonTemporal(ddl::StoreChoice::kAllReduce, kBytes),
            "no trial of the other stores");
    }
  });
}

TEST(LargeGathersThatGoPastTheCachesAreExact) {
  RunThreads(2, [](ddl::HostGroup& group) {
    AllGatherOnce(group, {3'000'001, 2'000'003}, false);
    BroadcastOnce(group, CharsOf(17'000'003), 1);
  });
}

TEST(DeathOfAPeerEndsGathersToo) {
  const std::function<ddl::Status(ddl::HostGroup&, float*)> collectives[] = {
      [](ddl::HostGroup& group, float* values) {
        return ddl::BroadcastInPieces(&group, values, 4'000'000, 0);
      },
      [](ddl::HostGroup& group, float* values) {
        const std::vector<int64_t> nbytes(group.size(), 1'000'000);
        return ddl::AllGatherInPieces(&group, values + 250'000 * group.rank(), values, nbytes);
      },
      [](ddl::HostGroup& group, float* values) {
        const std::vector<int64_t> counts(group.size(), 250'000);
        return ReduceScatter(group, values, values + 250'000 * group.rank(), counts);
      },
  };
  for (const auto& collective : collectives) {
    for (const int victim : {0, 2}) {
      SharedCount at_work;  // one that dies before it has joined is missing, not dead
      RunProcesses(
          3,
          [&](ddl::HostGroup& group) {
            std::vector<float> values(1'000'000, 0.0f);
            ddl::Status status = collective(group, values.data());
            CHECK(status.ok(), status.message());
            at_work.Add();
            while (status.ok()) status = collective(group, values.data());
            CHECK(status.code() == ddl::Code::kAborted, status.message());
            CHECK(status.message().find("rank " + std::to_string(victim) + " has ended") !=
                      std::string::npos,
                  status.message());
          },
          60, victim,
          [&, victim](const std::vector<pid_t>& ranks) {
            at_work.Await(3);
            usleep(10'000);
            kill(ranks[victim], SIGKILL);
          });
    }
  }
}

}  // namespace
