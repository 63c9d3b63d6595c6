// The algorithms between hosts, on threads.

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <random>

#include "algorithms/direct_allreduce.h"
#include "algorithms/direct_reduce_scatter.h"
#include "algorithms/halving_doubling.h"
#include "algorithms/network_allreduce.h"
#include "algorithms/ring.h"
#include "algorithms/tree_broadcast.h"
#include "core/half.h"
#include "networks.h"
#include "values.h"

namespace {

using AllReduceFunction = ddl::Status (*)(ddl::Transport*, const void*, void*, int64_t, ddl::DType,
                                          ddl::Reduction);
struct Algorithm {
  const char* name;
  AllReduceFunction run;
};
const Algorithm kAlgorithms[] = {{"ring", ddl::RingAllReduce},
                                 {"halving and doubling", ddl::HalvingDoublingAllReduce},
                                 {"doubling", ddl::DoublingAllReduce},
                                 {"direct", ddl::DirectAllReduce}};
constexpr int64_t kSegment = int64_t{256} << 10;  // bytes, of rings and chains

std::string Where(const ddl::Transport& transport, const char* name) {
  return "rank " + std::to_string(transport.rank()) + " of " + std::to_string(transport.size()) +
         ", " + name;
}

template <typename T>
void AllReduceOnce(ddl::Transport& transport, const Algorithm& algorithm, int64_t count,
                   bool in_place, int divisor) {
  const int rank = transport.rank(), size = transport.size();
  std::vector<T> values = ValuesOf<T>(count, rank, size);
  std::vector<T> results(count);
  T* out = in_place ? values.data() : results.data();
  const ddl::Status status =
      algorithm.run(&transport, values.data(), out, count, kDTypeOf<T>, divisor);
  const std::string where = Where(transport, algorithm.name) + ", " + ddl::DTypeName(kDTypeOf<T>);
  CHECK(status.ok(), where + ": " + status.message());
  CheckTotal(in_place ? values : results, size, divisor, where);
  if (!in_place) CHECK(Same(values, ValuesOf<T>(count, rank, size)), where);
}

template <typename T>
void AllReduceCounts(ddl::Transport& transport, const std::vector<int64_t>& counts) {
  for (const Algorithm& algorithm : kAlgorithms) {
    for (const int64_t count : counts) {
      AllReduceOnce<T>(transport, algorithm, count, count % 2 == 0, 1);
      AllReduceOnce<T>(transport, algorithm, count, count % 2 != 0, transport.size());
    }
  }
}

TEST(AllReduceBetweenHostsIsExact) {
  for (int size = 1; size <= 9; ++size) {
    RunOnNetwork(size, [](ddl::Transport& transport) {
      AllReduceCounts<float>(transport, {0, 1, 2, 7, 1000, 12'345});
      AllReduceCounts<double>(transport, {5});
      AllReduceCounts<int32_t>(transport, {1001});
      AllReduceCounts<int64_t>(transport, {33});
    });
  }
}

TEST(AllReduceBetweenHostsInManySegmentsAndPiecesIsExact) {
  for (const int size : {2, 3}) {
    RunOnNetwork(size, [](ddl::Transport& transport) {
      const int64_t segment = kSegment / sizeof(float) * transport.size();
      for (const int64_t count : {segment, 3 * segment + 1}) {
        AllReduceOnce<float>(transport, kAlgorithms[0], count, count % 2 == 0, 2);
      }
    });
  }
  RunOnNetwork(3, [](ddl::Transport& transport) {
    for (const Algorithm& algorithm : kAlgorithms) {
      AllReduceOnce<int64_t>(transport, algorithm, (int64_t{4} << 20) / 8 + 1, true, 1);
    }
  });
}

TEST(DirectAllReduceRoundsHalvesOnce) {
  for (const ddl::DType dtype : {ddl::DType::kFloat16, ddl::DType::kBfloat16}) {
    for (int size = 1; size <= 5; ++size) {
      RunOnNetwork(size, [&](ddl::Transport& transport) {
        constexpr int64_t kCount = 1001;
        // Rounded after each addition, the sum would stay 2048.
        const float total = 2048.0f + 0.75f * static_cast<float>(size - 1);
        const std::vector<float> mine(kCount, transport.rank() == 0 ? 2048.0f : 0.75f);
        const std::vector<float> all(kCount, total);
        std::vector<uint16_t> halves(kCount), want(kCount);
        ddl::Narrow(mine.data(), halves.data(), kCount, dtype);
        ddl::Narrow(all.data(), want.data(), kCount, dtype);
        const ddl::Status status =
            ddl::NetworkAllReduce(&transport, halves.data(), halves.data(), kCount, dtype, 1);
        CHECK(status.ok(), status.message());
        CHECK(halves == want, Where(transport, ddl::DTypeName(dtype)));
      });
    }
  }
}

// Of a tensor of `whole` elements, whose algorithm it has.
template <typename T>
void AverageLimits(ddl::Transport& transport, int64_t count, int64_t whole) {
  const int rank = transport.rank(), size = transport.size();
  const std::vector<std::vector<T>> inputs = LimitsOf<T>(size, count);
  const std::string where = Where(transport, ddl::DTypeName(kDTypeOf<T>));
  std::vector<T> values = inputs[rank];
  const ddl::Status reduced = ddl::NetworkAllReduce(&transport, values.data(), values.data(), count,
                                                    kDTypeOf<T>, size, whole);
  CHECK(reduced.ok(), reduced.message());
  for (int64_t i = 0; i < count; ++i) {
    CHECK(values[i] == AverageOf(inputs, i, size),
          where + " of " + std::to_string(count) + ": [" + std::to_string(i) + "] is " +
              std::to_string(values[i]) + ", not " + std::to_string(AverageOf(inputs, i, size)));
  }
}

TEST(AveragesOfSmallIntegersBetweenHostsDoNotWrapAround) {
  for (const int size : {2, 3, 4}) {
    RunOnNetwork(size, [](ddl::Transport& transport) {
      // As short as sums that are doubled, as long as those that are halved or take the ring.
      for (const int64_t whole : {int64_t{1001}, int64_t{1} << 20, int64_t{8} << 20}) {
        for (const int64_t count : {0, 1, 7, 1001}) {
          AverageLimits<int8_t>(transport, count, whole);
          AverageLimits<uint8_t>(transport, count, whole);
          AverageLimits<int16_t>(transport, count, whole);
          AverageLimits<uint16_t>(transport, count, whole);
          AverageLimits<int32_t>(transport, count, whole);
          AverageLimits<uint32_t>(transport, count, whole);
        }
      }
    });
  }
}

// Magnitudes over 12 decades, so that another order of additions gives other bits.
std::vector<float> ManyMagnitudes(int64_t count, int rank) {
  std::mt19937 random(100 + rank);
  std::uniform_real_distribution<float> mantissa(-1, 1), exponent(-6, 6);
  std::vector<float> values(count);
  for (float& value : values) value = mantissa(random) * std::pow(10.0f, exponent(random));
  return values;
}

TEST(BitsBetweenHostsAreTheSameOnAllRanksAndInEveryRun) {
  constexpr int64_t kCount = 100'003;
  for (const int size : {2, 3, 4, 7}) {
    for (const Algorithm& algorithm : kAlgorithms) {
      std::vector<std::vector<float>> results(size * 3, std::vector<float>(kCount));
      RunOnNetwork(size, [&](ddl::Transport& transport) {
        const int rank = transport.rank();
        const std::vector<float> in = ManyMagnitudes(kCount, rank);
        std::mt19937 random(rank);
        for (int run = 0; run < 3; ++run) {
          usleep(random() % 2000);
          const ddl::Status status = algorithm.run(&transport, in.data(),
                                                   results[run * size + rank].data(), kCount,
                                                   ddl::DType::kFloat32, size);
          CHECK(status.ok(), status.message());
        }
      });
      for (const std::vector<float>& result : results) {
        CHECK(std::memcmp(result.data(), results[0].data(), kCount * 4) == 0, algorithm.name);
      }
    }
  }
}

TEST(RanksSendWhatTheFormulasSay) {
  constexpr int64_t kCount = 5 * 7 * 8 * 256, kBytes = kCount * 4;
  for (const int size : {2, 4, 5, 7, 8}) {
    for (const Algorithm& algorithm : kAlgorithms) {
      const std::vector<int64_t> sent = RunOnNetwork(size, [&](ddl::Transport& transport) {
        AllReduceOnce<float>(transport, algorithm, kCount, false, 1);
      });
      const bool tree = algorithm.run == ddl::DoublingAllReduce ||
                        algorithm.run == ddl::HalvingDoublingAllReduce;
      int64_t power = 1, steps = 0;
      for (; 2 * power <= size; power *= 2) ++steps;
      for (int rank = 0; rank < size; ++rank) {
        int64_t want = 2 * kBytes / size * (size - 1);
        if (tree) {
          // The even ones of the neighbours only hand over, the odd ones hand back.
          const bool paired = rank < 2 * (size - power);
          const int64_t own = algorithm.run == ddl::DoublingAllReduce
                                  ? steps * kBytes
                                  : 2 * kBytes / power * (power - 1);
          want = paired && rank % 2 == 0 ? kBytes : own + (paired ? kBytes : 0);
        }
        CHECK(sent[rank] == want, std::string(algorithm.name) + ", rank " + std::to_string(rank) +
                                      " of " + std::to_string(size) + ": sent " +
                                      std::to_string(sent[rank]) + ", not " +
                                      std::to_string(want));
      }
    }
  }
}

TEST(RingAllGatherJoinsUnequalPartsInAnyOrder) {
  for (int size = 1; size <= 9; ++size) {
    for (const int64_t unit : {int64_t{1}, kSegment / 3 + 1}) {
      std::vector<ddl::Range> ranges(size);
      int64_t end = 0;
      for (int rank = size - 1; rank >= 0; --rank) {
        ranges[rank] = {end, end + rank * 5 % 4 * unit};
        end = ranges[rank].end;
      }
      std::vector<char> want(end);
      for (int rank = 0; rank < size; ++rank) {
        for (int64_t i = ranges[rank].begin; i < ranges[rank].end; ++i) {
          want[i] = static_cast<char>((i * size + rank) % 127);
        }
      }
      RunOnNetwork(size, [&](ddl::Transport& transport) {
        const ddl::Range& own = ranges[transport.rank()];
        const std::vector<char> in(want.begin() + own.begin, want.begin() + own.end);
        std::vector<char> out(end);
        const ddl::Status status = ddl::RingAllGather(&transport, in.data(), out.data(), ranges);
        CHECK(status.ok(), status.message());
        CHECK(out == want, Where(transport, "ring allgather"));
      });
    }
  }
}

TEST(TreeBroadcastReachesAll) {
  for (int size = 1; size <= 9; ++size) {
    for (const int64_t nbytes : {int64_t{0}, int64_t{1}, int64_t{1001}, kSegment + 1,
                                 size < 6 ? size * kSegment + 1 : 2 * kSegment}) {
      const std::vector<char> values =  // a root's begin at its rank
          Repeated<char>(0, nbytes + size, [](int64_t index) { return index % kPeriod % 251; });
      RunOnNetwork(size, [&](ddl::Transport& transport) {
        for (int root = 0; root < size; ++root) {
          const std::vector<char> want(values.begin() + root, values.begin() + root + nbytes);
          std::vector<char> got = transport.rank() == root ? want : std::vector<char>(nbytes);
          const ddl::Status status = ddl::TreeBroadcast(&transport, got.data(), nbytes, root);
          CHECK(status.ok(), status.message());
          CHECK(got == want, Where(transport, ("broadcast from " + std::to_string(root)).c_str()));
        }
      });
    }
  }
}

TIMED_TEST(MissingAndEndedRanksAreErrors) {
  for (const Algorithm& algorithm : kAlgorithms) {
    for (const bool ends : {false, true}) {
      constexpr int kSize = 4;
      ddl::ThreadNetwork network(kSize, ends ? 60 : Paced(0.1));
      std::unique_ptr<ddl::Transport> missing = network.Join(2);
      std::vector<std::thread> threads;
      for (const int rank : {0, 1, 3}) {
        threads.emplace_back([&, rank] {
          std::vector<float> values(1000);  // outlives the transport, which may still use it
          const std::unique_ptr<ddl::Transport> transport = network.Join(rank);
          const auto reduce = [&] {
            return algorithm.run(transport.get(), values.data(), values.data(), 1000,
                                 ddl::DType::kFloat32, 1);
          };
          const ddl::Status status = reduce();
          CHECK(!status.ok(), algorithm.name);
          if (ends) {
            CHECK(status.code() == ddl::Code::kAborted, status.message());
          } else {
            // Or a peer has given up before.
            CHECK(status.code() == ddl::Code::kDeadlineExceeded ||
                      status.code() == ddl::Code::kAborted,
                  status.message());
          }
          CHECK(status.message().find("rank ") == 0, status.message());
          CHECK(reduce().message() == status.message(), "the error stays");
        });
      }
      if (ends) missing.reset();
      for (std::thread& thread : threads) thread.join();
    }
  }
}

TEST(MessagesOfARankThatComesTooLateFindMemory) {
  for (const Algorithm& algorithm : kAlgorithms) {
    ddl::ThreadNetwork network(2, 0.05);
    std::vector<float> values[2] = {std::vector<float>(1000), std::vector<float>(1000)};
    std::unique_ptr<ddl::Transport> ranks[2] = {network.Join(0), network.Join(1)};
    for (const int rank : {0, 1}) {
      const ddl::Status status =
          algorithm.run(ranks[rank].get(), values[rank].data(), values[rank].data(), 1000,
                        ddl::DType::kFloat32, 1);
      // What rank 0 had sent is there, so rank 1 may well come to the end.
      CHECK(rank == 1 || status.code() == ddl::Code::kDeadlineExceeded, algorithm.name);
    }
  }
}

TEST(MessagesOfOtherLengthsAreErrors) {
  RunOnNetwork(
      2,
      [](ddl::Transport& transport) {
        char bytes[8] = {};
        const int peer = 1 - transport.rank();
        const int64_t received = transport.rank() == 0 ? 8 : 4;
        const ddl::Status status = transport.Exchange(peer, bytes, 8, peer, bytes, received);
        // Rank 0 gets what it expects, and finds nobody to take what it has sent.
        CHECK(!status.ok(), "no error");
      },
      0.5);
}

}  // namespace
