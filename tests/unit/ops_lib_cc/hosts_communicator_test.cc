// Ranks on several hosts, all of them threads: memory for each host, messages between them.

#include "comm/hosts_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <new>
#include <numeric>
#include <random>

#include "core/half.h"
#include "hosts.h"
#include "ranks.h"
#include "thread_communicator.h"
#include "transport/thread_transport.h"
#include "values.h"

namespace {

using ddl::Communicator;
using ddl::DType;

const std::vector<std::vector<int>> kJobs = {{2, 2}, {2, 1}, {3, 3, 2}, {1, 4}};

template <typename T>
void SumOnce(Communicator& group, int64_t count, bool in_place, int divisor) {
  std::vector<T> values = ValuesOf<T>(count, group.rank(), group.size()), results(count);
  T* out = in_place ? values.data() : results.data();
  const ddl::Status status =
      group.AllReduce(values.data(), out, count, kDTypeOf<T>, divisor);
  CHECK(status.ok(), status.message());
  CheckTotal(in_place ? values : results, group.size(), divisor, "between hosts");
}

TEST(SumsOverHostsAreExact) {
  for (const std::vector<int>& job : kJobs) {
    RunOnHosts(job, [](Communicator& group) {
      for (const int64_t count : {0, 1, 7, 1000, 300'001}) {
        SumOnce<float>(group, count, count % 2 == 0, group.size());
        SumOnce<float>(group, count, count % 2 != 0, 1);
      }
      SumOnce<int64_t>(group, 12'345, true, 1);
    });
  }
}

// Rows of two tensors, and one row more on the first ranks.
template <typename T>
void ScatterOnce(Communicator& group, const std::vector<int64_t>& counts, int divisor) {
  const int rank = group.rank(), size = group.size();
  std::vector<std::vector<T>> ins, outs;
  std::vector<ddl::SharedTensor> tensors;
  for (const int64_t count : counts) {
    ins.push_back(ValuesOf<T>(count, rank, size));
    outs.emplace_back(ddl::EqualPart(count, size, rank).count());
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    tensors.push_back({ins[i].data(), outs[i].data(), {}});
    for (int one = 0; one < size; ++one) {
      const ddl::Range part = ddl::EqualPart(counts[i], size, one);
      tensors[i].shares.push_back({part.begin * static_cast<int64_t>(sizeof(T)),
                                   part.end * static_cast<int64_t>(sizeof(T))});
    }
  }
  const ddl::Status status = group.ReduceScatterN(tensors, kDTypeOf<T>, divisor);
  CHECK(status.ok(), status.message());
  for (size_t i = 0; i < counts.size(); ++i) {
    const int64_t first = ddl::EqualPart(counts[i], size, rank).begin;
    CheckTotals(outs[i].data(), static_cast<int64_t>(outs[i].size()), first, size, divisor,
                std::to_string(counts[i]));
  }
}

TEST(SharesOverHostsAreExact) {
  for (const std::vector<int>& job : kJobs) {
    const int size = std::accumulate(job.begin(), job.end(), 0);
    const int64_t hosts = static_cast<int64_t>(job.size()), count = 64 * 16 * size;
    // What leaves a host, of S bytes: (H - 1) / H * S.
    const std::vector<int64_t> sent = RunOnHosts(job, [count](Communicator& group) {
      ScatterOnce<float>(group, {count}, group.size());
    });
    if (job == kJobs[0]) {  // as many ranks on each host
      for (const int64_t one : sent) CHECK(one == count * 4 * (hosts - 1) / hosts, "");
    }
    RunOnHosts(job, [](Communicator& group) {
      for (const std::vector<int64_t>& counts :
           {std::vector<int64_t>{0}, {1, 7}, {1000, 0, 3}, {300'001, 17}}) {
        ScatterOnce<float>(group, counts, group.size());
        ScatterOnce<int64_t>(group, counts, 1);
      }
    });
  }
}

TEST(ExchangesOverHostsAreExact) {
  for (const std::vector<int>& job : kJobs) {
    RunOnHosts(job, [](Communicator& group) {
      const int rank = group.rank(), size = group.size();
      for (const int64_t scale : {0, 1, 40'001}) {
        std::vector<int64_t> nbytes;
        for (int pair = 0; pair < size * size; ++pair) nbytes.push_back(pair % 5 * scale);
        const ddl::Exchange exchange(rank, size, nbytes);
        std::vector<char> in(exchange.sent(size - 1).end), out(exchange.received(size - 1).end);
        for (int to = 0; to < size; ++to) {
          for (int64_t i = exchange.sent(to).begin; i < exchange.sent(to).end; ++i) {
            in[i] = static_cast<char>((i - exchange.sent(to).begin) * 3 + rank * 16 + to);
          }
        }
        const ddl::Status status = group.AllToAll(in.data(), out.data(), exchange);
        CHECK(status.ok(), status.message());
        for (int from = 0; from < size; ++from) {
          const ddl::Range block = exchange.received(from);
          for (int64_t i = block.begin; i < block.end; ++i) {
            CHECK(out[i] == static_cast<char>((i - block.begin) * 3 + from * 16 + rank), "");
          }
        }
      }
    });
  }
}

// Rounds are for what travels between hosts; in each, every pair of ranks has a message.
TEST(WhatStaysWithinAHostMakesNoRoundsBetweenHosts) {
  constexpr int kSize = 3;
  std::vector<int64_t> nbytes(kSize * kSize, 10);
  nbytes[0 * kSize + 1] = (int64_t{64} << 20) / (kSize - 1) * 2;  // both are of the first host
  std::vector<int64_t> sent;
  RunOnHosts(
      {2, 1},
      [&](Communicator& group) {
        const ddl::Exchange exchange(group.rank(), kSize, nbytes);
        std::vector<char> in(exchange.sent(kSize - 1).end, static_cast<char>(group.rank() + 1));
        std::vector<char> out(exchange.received(kSize - 1).end);
        CHECK(group.AllToAll(in.data(), out.data(), exchange).ok(), "");
        for (int from = 0; from < kSize; ++from) {
          const ddl::Range block = exchange.received(from);
          CHECK(std::count(out.begin() + block.begin, out.begin() + block.end,
                           static_cast<char>(from + 1)) == block.count(),
                std::to_string(from));
        }
      },
      60, nullptr, 1, &sent);
  CHECK(sent == (std::vector<int64_t>{10, 10, 20}),
        std::to_string(sent[0]) + " " + std::to_string(sent[1]) + " " + std::to_string(sent[2]));
}

TEST(SmallestOverHostsIsExact) {
  RunOnHosts({2, 1}, [](Communicator& group) {
    std::vector<int8_t> values(100'001), want(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const auto of = [i](int rank) { return static_cast<int8_t>((i * 7 + rank * 91) % 251); };
      values[i] = of(group.rank());
      want[i] = of(0);
      for (int rank = 1; rank < group.size(); ++rank) want[i] = std::min(want[i], of(rank));
    }
    const ddl::Status status =
        group.AllReduce(values.data(), values.data(), static_cast<int64_t>(values.size()),
                        DType::kInt8, {ddl::ReduceOp::kMin, 1});
    CHECK(status.ok(), status.message());
    CHECK(values == want, "");
  });
}

// Of tensors small and large, in place and not, and of this rank's shares of them.
template <typename T>
void AverageLimits(Communicator& group, const std::vector<int64_t>& counts) {
  const int rank = group.rank(), size = group.size();
  std::vector<std::vector<std::vector<T>>> inputs;  // of each tensor and rank
  std::vector<std::vector<T>> values, results, shares;
  std::vector<ddl::TensorSpan> tensors;
  std::vector<ddl::SharedTensor> shared;
  const size_t all = counts.size();
  for (const int64_t count : counts) {
    inputs.push_back(LimitsOf<T>(size, count));
    values.push_back(inputs.back()[rank]);
    results.emplace_back(count);
    shares.emplace_back(ddl::EqualPart(count, size, rank).count());
  }
  for (size_t i = 0; i < all; ++i) {
    tensors.push_back({values[i].data(), (i % 2 ? values : results)[i].data(), counts[i]});
    shared.push_back({inputs[i][rank].data(), shares[i].data(), {}});
    for (int one = 0; one < size; ++one) {
      const ddl::Range part = ddl::EqualPart(counts[i], size, one);
      shared[i].shares.push_back({part.begin * static_cast<int64_t>(sizeof(T)),
                                  part.end * static_cast<int64_t>(sizeof(T))});
    }
  }
  const ddl::Status reduced = group.AllReduceN(tensors, kDTypeOf<T>, size);
  CHECK(reduced.ok(), reduced.message());
  const ddl::Status scattered = group.ReduceScatterN(shared, kDTypeOf<T>, size);
  CHECK(scattered.ok(), scattered.message());
  for (size_t i = 0; i < all; ++i) {
    const std::vector<T>& got = (i % 2 ? values : results)[i];
    const ddl::Range own = ddl::EqualPart(counts[i], size, rank);
    const std::string where = std::string(ddl::DTypeName(kDTypeOf<T>)) + " on " +
                              std::to_string(size) + " ranks, " + std::to_string(counts[i]);
    for (int64_t at = 0; at < counts[i]; ++at) {
      const T want = AverageOf(inputs[i], at, size);
      CHECK(got[at] == want, where + ": " + std::to_string(got[at]) + ", not " +
                                 std::to_string(want));
      if (at < own.begin || at >= own.end) continue;
      CHECK(shares[i][at - own.begin] == want, where + " (share)");
    }
  }
}

TEST(AveragesOfSmallIntegersOverHostsDoNotWrapAround) {
  for (const std::vector<int>& job : kJobs) {
    RunOnHosts(job, [](Communicator& group) {
      AverageLimits<int8_t>(group, {1, 7});
      AverageLimits<uint8_t>(group, {0});
      AverageLimits<uint8_t>(group, {1001, 0, 33'333});
      AverageLimits<int16_t>(group, {7});
      AverageLimits<uint16_t>(group, {33, 5});
      AverageLimits<int32_t>(group, {70'001});
      AverageLimits<uint32_t>(group, {129, 1});
      SumOnce<float>(group, 1'001, true, group.size());  // and what follows is right
    });
  }
}

// Of 1 MiB for each share: more of them than can be under way, the last one shorter.
TEST(FragmentsOverHostsAreExact) {
  for (const auto& [job, count] : {std::pair{std::vector<int>{2, 2}, 1'800'001},
                                   std::pair{std::vector<int>{2, 1}, 900'003}}) {
    RunOnHosts(job, [count = count](Communicator& group) {
      SumOnce<float>(group, count, true, group.size());
      SumOnce<int32_t>(group, count, false, 1);
      SumOnce<float>(group, 1'001, false, 1);  // and what follows is right
    });
  }
}

TEST(ChannelsOfRanksOnHostsAreExact) {
  RunOnHosts(
      {2, 2},
      [](Communicator& group) {
        SumOnce<float>(group, 1'800'001, true, group.size());
        SumOnce<int64_t>(group, 300'001, false, 1);
        std::vector<char> bytes(5'000'001, static_cast<char>(group.rank()));
        const ddl::Status status = group.Broadcast(bytes.data(), 5'000'001, 2);
        CHECK(status.ok(), status.message());
        CHECK(bytes == std::vector<char>(5'000'001, 2), "broadcast");
      },
      60, nullptr, 2);
}

TEST(GroupsOverHostsAreExact) {
  for (const std::vector<int>& job : kJobs) {
    RunOnHosts(job, [](Communicator& group) {
      const std::vector<int64_t> counts = {17, 0, 300'001, 1, 70'000, 33};
      std::vector<std::vector<float>> values;
      std::vector<ddl::TensorSpan> tensors;
      for (const int64_t count : counts) {
        values.push_back(ValuesOf<float>(count, group.rank(), group.size()));
        tensors.push_back({values.back().data(), values.back().data(), count});
      }
      const ddl::Status status = group.AllReduceN(tensors, DType::kFloat32, group.size());
      CHECK(status.ok(), status.message());
      for (const std::vector<float>& value : values) {
        CheckTotal(value, group.size(), group.size(), "a group between hosts");
      }
    });
  }
}

TEST(LargeGroupsOverHostsAreExact) {
  for (const std::vector<int>& job : {std::vector<int>{2, 2}, {2, 3, 2}}) {
    RunOnHosts(job, [](Communicator& group) {
      // Fragments end within large tensors and between small ones.
      std::vector<int64_t> counts = {600'007, 1, 0, 262'144, 33};
      counts.insert(counts.end(), 100, 4'097);
      counts.push_back(300'001);
      std::vector<std::vector<float>> values, results;
      std::vector<ddl::TensorSpan> tensors;
      for (const int64_t count : counts) {
        values.push_back(ValuesOf<float>(count, group.rank(), group.size()));
        results.emplace_back(count);
      }
      for (size_t i = 0; i < counts.size(); ++i) {
        tensors.push_back({values[i].data(), (i % 2 == 0 ? results : values)[i].data(), counts[i]});
      }
      const ddl::Status status = group.AllReduceN(tensors, DType::kFloat32, 1);
      CHECK(status.ok(), status.message());
      for (size_t i = 0; i < counts.size(); ++i) {
        CheckTotal((i % 2 == 0 ? results : values)[i], group.size(), 1, "a large group");
      }
    });
  }
}

TEST(HalvesTravelBetweenHostsAsHalves) {
  for (const std::vector<int>& job : kJobs) {
    const int hosts = static_cast<int>(job.size());
    // A multiple of hosts and of ranks, so that all shares are alike.
    constexpr int64_t kCount = 2 * 3 * 4 * 10'000;
    const std::vector<int64_t> sent = RunOnHosts(job, [](Communicator& group) {
      std::vector<uint16_t> values(kCount, 0x3f80);  // 1
      const ddl::Status status = group.AllReduce(values.data(), values.data(), kCount,
                                                 DType::kBfloat16, group.size());
      CHECK(status.ok(), status.message());
      CHECK(values == std::vector<uint16_t>(kCount, 0x3f80), "1 on average");
    });
    for (const int64_t nbytes : sent) {
      CHECK(nbytes == 2 * (hosts - 1) * kCount * 2 / hosts,
            std::to_string(nbytes) + " bytes from a host of " + std::to_string(hosts));
    }
  }
}

// docs/ops.md: each host's part is rounded once, and the sum of these.
TEST(HalvesOverHostsAreAsExactAsTheDocsSay) {
  constexpr int64_t kCount = 5'003;
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    const double unit = dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
    const double least = dtype == DType::kFloat16 ? 0x1p-25 : 0;  // of half a subnormal step
    for (const std::vector<int>& job : kJobs) {
      const int size = std::accumulate(job.begin(), job.end(), 0);
      const int hosts = static_cast<int>(job.size());
      std::vector<std::vector<uint16_t>> inputs(size, std::vector<uint16_t>(kCount));
      std::vector<double> want(kCount, 0), parts(kCount, 0);
      for (int host = 0, rank = 0; host < hosts; ++host) {
        std::vector<double> of_host(kCount, 0);
        for (int rank_on_host = 0; rank_on_host < job[host]; ++rank_on_host, ++rank) {
          std::mt19937 random(rank);
          std::uniform_real_distribution<float> mantissa(-1, 1), exponent(-6, 3);
          for (int64_t i = 0; i < kCount; ++i) {
            float number = mantissa(random) * std::pow(10.0f, exponent(random));
            ddl::Narrow(&number, &inputs[rank][i], 1, dtype);
            ddl::Widen(&inputs[rank][i], &number, 1, dtype);
            of_host[i] += number;
          }
        }
        for (int64_t i = 0; i < kCount; ++i) {
          want[i] += of_host[i] / size;
          parts[i] += std::abs(of_host[i]) / size;
        }
      }
      std::vector<std::vector<uint16_t>> results(size);
      RunOnHosts(job, [&](Communicator& group) {
        std::vector<uint16_t> out(kCount);
        const ddl::Status status = group.AllReduce(inputs[group.rank()].data(), out.data(), kCount,
                                                   dtype, group.size());
        CHECK(status.ok(), status.message());
        results[group.rank()] = out;
      });
      std::vector<float> got(kCount);
      ddl::Widen(results[0].data(), got.data(), kCount, dtype);
      for (int64_t i = 0; i < kCount; ++i) {
        // A little more, for float32's own rounding.
        const double bound =
            1.01 * (unit * (parts[i] + std::abs(want[i])) + (hosts + 1) * least) + 1e-6 * parts[i];
        CHECK(std::abs(got[i] - want[i]) <= bound,
              std::string(ddl::DTypeName(dtype)) + ": " + std::to_string(got[i]) + ", not " +
                  std::to_string(want[i]));
      }
      for (const auto& result : results) CHECK(result == results[0], "the same bits on all ranks");
    }
  }
}

TEST(AveragesOfLargeHalvesOverHostsDoNotOverflow) {
  RunOnHosts({2, 2}, [](Communicator& group) {
    const float large = 60'000;
    uint16_t half = 0;
    ddl::Narrow(&large, &half, 1, DType::kFloat16);
    std::vector<uint16_t> values(100, half);
    const ddl::Status status =
        group.AllReduce(values.data(), values.data(), 100, DType::kFloat16, group.size());
    CHECK(status.ok(), status.message());
    CHECK(values == std::vector<uint16_t>(100, half), "the average of equal numbers");
  });
}

// Rank 3 leaves. Rank 1, which waits for it, tells rank 0, which waits for rank 2, which does
// nothing.
TEST(ErrorBetweenHostsEndsTheOtherRanksOfTheHostAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  std::string said[2];
  std::atomic<int> failed{0};
  RunOnHosts({2, 2}, [&](Communicator& group) {
    if (group.rank() == 3) return;
    if (group.rank() == 2) {
      while (failed < 2) usleep(1000);
      return;
    }
    std::vector<float> values(5'000'000, 1.0f);
    const auto reduce = [&] {
      return group.AllReduce(values.data(), values.data(), 5'000'000, DType::kFloat32, 1);
    };
    const ddl::Status status = reduce();
    CHECK(status.code() == ddl::Code::kAborted, status.message());
    said[group.rank()] = status.message();
    CHECK(reduce().message() == status.message(), "the error stays");
    ++failed;
  });
  CHECK(said[0] == said[1] && said[0].find("has ended") != std::string::npos, said[0]);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30), "half the timeout");
}

TEST(RankThatStopsBetweenFragmentsEndsAll) {
  for (const int victim : {0, 3}) {
    RunOnHosts({2, 2}, [victim](Communicator& group) {
      std::vector<float> values(3'000'000, 1.0f);
      ddl::Status status;
      for (int run = 0; status.ok() && run < 2; ++run) {
        if (run == 1 && group.rank() == victim) group.Break({ddl::Code::kInternal, "no memory"});
        status = group.AllReduce(values.data(), values.data(), 3'000'000, DType::kFloat32, 1);
      }
      CHECK(!status.ok(), "rank " + std::to_string(group.rank()));
    });
  }
}

TEST(BroadcastsOverHostsReachAll) {
  for (const std::vector<int>& job : kJobs) {
    RunOnHosts(job, [](Communicator& group) {
      for (const int64_t nbytes : {0, 1, 1001, 300'001}) {
        const int root = static_cast<int>(nbytes % group.size());
        std::vector<char> want(nbytes);
        for (int64_t i = 0; i < nbytes; ++i) want[i] = static_cast<char>(i % 101);
        std::vector<char> got = group.rank() == root ? want : std::vector<char>(nbytes, 77);
        const ddl::Status status = group.Broadcast(got.data(), nbytes, root);
        CHECK(status.ok(), status.message());
        CHECK(got == want, "broadcast between hosts");
      }
    });
  }
}

// The arrival of a rank that is about to run collective number `what`.
ddl::Arrival Plan(uint64_t what) {
  ddl::Arrival arrival;
  arrival.digest[0] = what;
  arrival.title = [what] { return "AllReduce \"" + std::to_string(what) + "\""; };
  return arrival;
}

// One rank after the other is another host's; the last ones have several on one.
const std::vector<std::vector<int>> kGroups = {{1, 1}, {2, 1}, {1, 1, 1}, {2, 3, 1, 2}, {2, 1, 1, 1, 1}};

TEST(RanksOfAllHostsSeeWhetherTheyDiffer) {
  for (const std::vector<int>& ranks_on : kGroups) {
    RunOnHosts(ranks_on, [&](Communicator& group) {
      for (int step = 0; step < 40; ++step) {
        const int other = step % (group.size() + 1);  // who differs; at times nobody
        ddl::BarrierResult result = ddl::BarrierResult::kCancelled;
        const ddl::Status status =
            group.Barrier(Plan(group.rank() == other ? 1000 : step), &result);
        CHECK(status.ok(), status.message());
        CHECK((result == ddl::BarrierResult::kMatch) == (other == group.size()),
              std::to_string(step));
        CHECK(result != ddl::BarrierResult::kCancelled, std::to_string(step));
      }
      ddl::Arrival leaves = Plan(0);
      leaves.leaving = true;
      ddl::BarrierResult result = ddl::BarrierResult::kMismatch;
      CHECK(group.Barrier(leaves, &result).ok() && result == ddl::BarrierResult::kMatch,
            "all leave");
    });
  }
}

void CancelOnce(const std::vector<int>& ranks_on, int late, int canceller) {
  std::atomic<int> cancellations{0};
  RunOnHosts(ranks_on, [&](Communicator& group) {
    for (int step = 0; step < 3; ++step) {
      std::atomic<bool> cancelled{false};
      ddl::Arrival arrival = Plan(step);
      arrival.cancelled = &cancelled;
      std::thread other;
      while (group.rank() == late && cancellations <= step) std::this_thread::yield();
      // The word of it takes several steps, and looks at flags between.
      if (group.rank() == late) SleepFor(0.4);
      if (group.rank() == canceller) {
        other = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          cancelled = true;
          ++cancellations;
        });
      }
      ddl::BarrierResult result = ddl::BarrierResult::kMatch;
      const ddl::Status status = group.Barrier(arrival, &result);
      CHECK(status.ok() && result == ddl::BarrierResult::kCancelled, status.message());
      if (other.joinable()) other.join();
      CHECK(group.Barrier(Plan(step), &result).ok() && result == ddl::BarrierResult::kMatch,
            "the next one");
    }
  });
}

TIMED_TEST(WhatARankCancelsBeforeTheLastArrivalIsDoneOnNoHost) {
  CancelOnce({2, 2}, 3, 2);           // of one host
  CancelOnce({2, 2}, 0, 2);           // the leader of its host
  CancelOnce({2, 2}, 0, 3);           // another one
  CancelOnce({1, 1, 1, 1, 1}, 0, 3);  // over several steps
}

TEST(ARankThatLeavesFailsThoseOfOtherHosts) {
  for (const std::vector<int>& ranks_on : kGroups) {
    const int last = std::accumulate(ranks_on.begin(), ranks_on.end(), 0) - 1;
    RunOnHosts(ranks_on, [&](Communicator& group) {
      ddl::BarrierResult result = ddl::BarrierResult::kMatch;
      ddl::Arrival arrival = Plan(7);
      arrival.leaving = group.rank() == last;
      const ddl::Status status = group.Barrier(arrival, &result);
      CHECK(status.code() == ddl::Code::kFailedPrecondition, status.message());
      const std::string part = "rank " + std::to_string(last) + " has already ended its script";
      CHECK(status.message().find(part) != std::string::npos, status.message());
      if (!arrival.leaving) {
        CHECK(status.message().find("AllReduce \"7\"") == 0, status.message());
        CHECK(!group.Barrier(Plan(8), &result).ok(), "the group is broken");
      }
    });
  }
}

TIMED_TEST(AMissingRankIsNamedOnEveryRankOfEveryHost) {
  for (const std::vector<int>& ranks_on : {kGroups[2], kGroups[3]}) {
    const int size = std::accumulate(ranks_on.begin(), ranks_on.end(), 0);
    for (const int missing : {0, size - 1}) {
      RunOnHosts(
          ranks_on,
          [&](Communicator& group) {
            ddl::BarrierResult result = ddl::BarrierResult::kMatch;
            if (group.rank() == missing) {
              // Too late, and alive: whoever dies is another kind of error.
              SleepFor(1.5);
              CHECK(!group.Barrier(Plan(7), &result).ok(), "the others have given up");
              return;
            }
            const ddl::Status status = group.Barrier(Plan(7), &result);
            CHECK(status.code() == ddl::Code::kDeadlineExceeded, status.message());
            const std::string part = "\": rank " + std::to_string(missing) + " did not come within";
            CHECK(status.message().find(part) != std::string::npos, status.message());
          },
          0.5);
    }
  }
}

TIMED_TEST(AChainOfWaitsOverHostsIsNoStall) {
  RunOnHosts(
      {2, 1, 1},
      [&](Communicator& group) {
        SleepFor(0.4 * group.rank());
        ddl::BarrierResult result = ddl::BarrierResult::kMismatch;
        const ddl::Status status = group.Barrier(Plan(1), &result);
        CHECK(status.ok() && result == ddl::BarrierResult::kMatch, status.message());
      },
      0.6);
}

// A rank that is always late has no time to look what the others tell each other meanwhile.
TIMED_TEST(WhatRanksTellWhileTheyWaitDoesNotPileUp) {
  Mailboxes mailboxes;
  RunOnHosts(
      {1, 2, 1},
      [&](Communicator& group) {
        for (int step = 0; step < 40; ++step) {
          if (group.rank() == 3) SleepFor(0.03);
          ddl::BarrierResult result = ddl::BarrierResult::kMismatch;
          CHECK(group.Barrier(Plan(step), &result).ok() && result == ddl::BarrierResult::kMatch,
                "");
        }
      },
      /*timeout_s=*/0.16, &mailboxes);
  CHECK(mailboxes.Left() < 20, std::to_string(mailboxes.Left()));
}

// Until `done`, or long after all should have been.
void AwaitOrGoOn(const std::function<bool()>& done) {
  for (int i = 0; i < 4000 * pace && !done(); ++i) usleep(1000);
}

// Rank 2 does not arrive. The executor of rank 0, the leader of its host, cancels its request and
// submits nothing more; rank 1 still waits.
TIMED_TEST(ARankKeepsItsLimitWhenTheFirstOfItsHostHasGivenUp) {
  for (const int early : {true, false}) {  // before or after the barrier of the host
    std::atomic<int> failed{0};
    RunOnHosts(
        {2, 1},
        [&](Communicator& group) {
          ddl::BarrierResult result = ddl::BarrierResult::kMatch;
          if (group.rank() == 2) {
            AwaitOrGoOn([&] { return failed == 2; });
            CHECK(!group.Barrier(Plan(7), &result).ok(), "the others have given up");
            return;
          }
          std::atomic<bool> cancelled{early && group.rank() == 0};
          ddl::Arrival arrival = Plan(7);
          arrival.cancelled = &cancelled;
          arrival.limited = [] { return false; };
          std::thread executor([&] {
            usleep(200'000);
            cancelled = group.rank() == 0;
          });
          const ddl::Status status = group.Barrier(arrival, &result);
          CHECK(status.code() == ddl::Code::kDeadlineExceeded, status.message());
          CHECK(status.message().find("\": rank 2 did not come within") != std::string::npos,
                status.message());
          ++failed;
          executor.join();
        },
        /*timeout_s=*/0.5);
  }
}

// As on one host: whoever wants nothing and has nothing else to do may wait.
TIMED_TEST(NoLimitHoldsWhereAllRanksOfAHostHaveGivenUp) {
  RunOnHosts(
      {2, 1},
      [&](Communicator& group) {
        std::atomic<bool> cancelled{group.rank() != 2};
        ddl::Arrival arrival = Plan(7);
        arrival.cancelled = &cancelled;
        arrival.limited = [] { return false; };
        if (group.rank() == 2) SleepFor(2);
        ddl::BarrierResult result = ddl::BarrierResult::kMatch;
        const ddl::Status status = group.Barrier(arrival, &result);
        CHECK(status.ok() && result == ddl::BarrierResult::kCancelled, status.message());
      },
      /*timeout_s=*/1);
}

// Rank 0, the leader of its host, stands still on its way to the other hosts, whose rank 2 is late.
TIMED_TEST(ARankGivesUpALeaderThatStandsStill) {
  Mailboxes mailboxes;
  std::atomic<bool> gave_up{false}, stood_still{false};
  mailboxes.takes = [&](int from, int, const std::string&) -> Mailboxes::Clock::duration {
    if (from == 0 && !stood_still.exchange(true)) AwaitOrGoOn([&] { return gave_up.load(); });
    return {};
  };
  RunOnHosts(
      {2, 1},
      [&](Communicator& group) {
        if (group.rank() == 2) AwaitOrGoOn([&] { return gave_up.load(); });
        ddl::BarrierResult result = ddl::BarrierResult::kMatch;
        const ddl::Status status = group.Barrier(Plan(7), &result);
        CHECK(status.code() == ddl::Code::kDeadlineExceeded, status.message());
        const std::string who = "AllReduce \"7\": rank 0 did not come within";
        CHECK(status.message().find(who) == 0, status.message());
        if (group.rank() == 1) gave_up = true;
      },
      /*timeout_s=*/0.5, &mailboxes);
}

// Rank 0 is stopped in its wait, by a signal or a control group, until rank 1 has come and the
// limit has passed. Then MPI shows nothing at the first look.
class Stopped : public BaseCommunicator {
 public:
  using BaseCommunicator::BaseCommunicator;
  static constexpr double kLimitS = 0.3;

  ddl::Status TryReceiveAny(int* peer, std::string* message, ddl::MessageTag tag) override {
    if (++looks_ != kBeforeTheStop) return BaseCommunicator::TryReceiveAny(peer, message, tag);
    stopped = true;
    AwaitOrGoOn([this] { return other_is_here.load(); });
    usleep(static_cast<useconds_t>(1.2e6 * kLimitS));
    *peer = -1;
    return ddl::Status();
  }

  std::atomic<bool> stopped{false}, other_is_here{false};

 private:
  static constexpr int kBeforeTheStop = 6;
  int looks_ = 0;
};

TEST(ARankThatWasStoppedLooksAgainBeforeItGivesUp) {
  Mailboxes mailboxes;
  Stopped first(0, 2, &mailboxes);
  BaseCommunicator second(1, 2, &mailboxes);
  const auto enter = [](ddl::Messenger* messenger, double limit_s) {
    ddl::DisseminationBarrier barrier(messenger, {{0}, {1}}, limit_s);
    barrier.Begin();
    ddl::BarrierResult result = ddl::BarrierResult::kMismatch;
    const ddl::Status status = barrier.ArriveAndWait(Plan(1), ddl::BarrierResult::kMatch, &result);
    CHECK(status.ok() && result == ddl::BarrierResult::kMatch, status.message());
  };
  std::thread other([&] {
    AwaitOrGoOn([&] { return first.stopped.load(); });
    enter(&second, 60);
    first.other_is_here = true;
  });
  enter(&first, Stopped::kLimitS);
  other.join();
}

// Rank 3 does not come. Rank 1 fails while the first of its host waits for the other hosts.
TEST(WhatFailsOnARankThatWaitsForItsLeaderEndsAllHosts) {
  Mailboxes mailboxes;
  std::atomic<bool> has_failed{false};
  mailboxes.takes = [&](int from, int, const std::string&) -> Mailboxes::Clock::duration {
    if (from == 1 && !has_failed.exchange(true)) throw std::bad_alloc();
    return {};
  };
  std::atomic<int> failed{0};
  RunOnHosts(
      {2, 1, 1},
      [&](Communicator& group) {
        if (group.rank() == 3) AwaitOrGoOn([&] { return failed == 3; });
        std::atomic<bool> cancelled{false};
        ddl::Arrival arrival = Plan(7);
        arrival.cancelled = &cancelled;
        std::thread executor([&] {
          usleep(200'000);
          cancelled = group.rank() == 1;  // which tells the other hosts
        });
        ddl::BarrierResult result = ddl::BarrierResult::kMatch;
        ddl::Status status;
        try {
          status = group.Barrier(arrival, &result);
        } catch (const std::bad_alloc&) {
          status = ddl::Status(ddl::Code::kInternal, "rank 1 could not go on");
          group.Break(status);
        }
        CHECK(status.message() == "rank 1 could not go on",
              std::to_string(group.rank()) + ": " + status.message());
        ++failed;
        executor.join();
      },
      60, &mailboxes);
}

// Rank 2 is done with its part of a collective in which rank 1 fails.
TEST(ARankThatFailsInACollectiveIsNamedOnHostsThatAreDoneWithIt) {
  std::atomic<int> agreed{0};
  std::atomic<bool> broken{false};
  RunOnHosts(
      {2, 1},
      [&](Communicator& group) {
        ddl::BarrierResult result = ddl::BarrierResult::kMatch;
        CHECK(group.Barrier(Plan(1), &result).ok(), "");
        ++agreed;
        ddl::Status status(ddl::Code::kInternal, "rank 1 could not go on");
        if (group.rank() == 1) {
          AwaitOrGoOn([&] { return agreed == 3; });
          group.Break(status);
          broken = true;
        } else if (group.rank() == 0) {
          AwaitOrGoOn([&] { return broken.load(); });
          std::vector<float> values(1000);
          status = group.AllReduce(values.data(), values.data(), 1000, DType::kFloat32, 1);
        } else {
          status = group.Barrier(Plan(2), &result);
        }
        CHECK(status.message() == "rank 1 could not go on",
              std::to_string(group.rank()) + ": " + status.message());
      },
      /*timeout_s=*/2);
}

// Rank 2 has reported at the first barrier that rank 1 is missing. Its message arrives after what
// rank 1 says at the second one, to which rank 3 does not come.
TEST(WhatARankReportedOfAnEarlierBarrierIsForgotten) {
  Mailboxes mailboxes;
  mailboxes.takes = [](int from, int, const std::string&) {
    return std::chrono::milliseconds(from == 2 ? 150 : 0);
  };
  const std::vector<std::vector<int>> groups = {{0}, {1, 2}, {3}};
  BaseCommunicator ranks[] = {{0, 4, &mailboxes}, {1, 4, &mailboxes}, {2, 4, &mailboxes}};
  ddl::DisseminationBarrier first(&ranks[0], groups, 1.2), leader(&ranks[1], groups, 60),
      other(&ranks[2], groups, 60);
  for (ddl::DisseminationBarrier* barrier : {&first, &leader, &other}) barrier->Begin();
  CHECK(other.ReportMissing({1}, 10).ok(), "");
  for (ddl::DisseminationBarrier* barrier : {&first, &leader, &other}) barrier->Begin();
  const auto enter = [](ddl::DisseminationBarrier* barrier) {
    ddl::BarrierResult result = ddl::BarrierResult::kMatch;
    const ddl::Status status = barrier->ArriveAndWait(Plan(2), ddl::BarrierResult::kMatch, &result);
    CHECK(status.message().find("\": rank 3 did not come within") != std::string::npos,
          status.message());
  };
  std::thread thread([&] { enter(&leader); });
  enter(&first);
  thread.join();
}

}  // namespace
