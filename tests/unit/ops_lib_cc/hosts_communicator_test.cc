// Ranks on several hosts, all of them threads: memory for each host, messages between them.

#include "comm/hosts_communicator.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/half.h"
#include "ranks.h"
#include "thread_communicator.h"
#include "transport/thread_transport.h"
#include "values.h"

namespace {

using ddl::Communicator;
using ddl::DType;

// What the ranks of these tests need of the group below: who they are.
class Place : public ThreadCommunicator {
 public:
  Place(int rank, int size) : ThreadCommunicator(nullptr), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }

 private:
  const int rank_, size_;
};

// Runs `function` on ranks_on[h] ranks of each host h. Returns the bytes that each host has sent.
std::vector<int64_t> RunOnHosts(const std::vector<int>& ranks_on,
                                const std::function<void(Communicator&)>& function) {
  constexpr double kTimeoutS = 60;
  const int hosts = static_cast<int>(ranks_on.size());
  const int shares = *std::min_element(ranks_on.begin(), ranks_on.end());
  const int size = std::accumulate(ranks_on.begin(), ranks_on.end(), 0);
  std::vector<std::unique_ptr<ddl::ThreadNetwork>> columns;
  for (int share = 0; share < shares; ++share) {
    columns.push_back(std::make_unique<ddl::ThreadNetwork>(hosts, kTimeoutS));
  }
  std::vector<std::unique_ptr<void, void (*)(void*)>> memories;
  std::vector<int> host_of;
  for (const int ranks : ranks_on) {
    host_of.insert(host_of.end(), ranks, static_cast<int>(memories.size()));
    const int64_t nbytes = (ddl::HostGroup::Nbytes(ranks) + 4095) / 4096 * 4096;
    memories.emplace_back(std::aligned_alloc(4096, nbytes), std::free);
    ddl::HostGroup::Format(memories.back().get(), ranks);
  }
  std::vector<std::thread> threads;
  for (int host = 0, rank = 0; host < hosts; ++host) {
    for (int place = 0; place < ranks_on[host]; ++place, ++rank) {
      threads.emplace_back([&, host, place, rank] {
        auto memory = std::make_unique<ddl::HostMemory>();
        memory->group = std::make_unique<ddl::HostGroup>(memories[host].get(), place,
                                                         ranks_on[host], kTimeoutS);
        ddl::HostsCommunicator communicator(
            std::make_unique<Place>(rank, size), std::move(memory),
            place < shares ? columns[place]->Join(host) : nullptr, shares,
            host_of);
        function(communicator);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int64_t> sent(hosts, 0);
  for (int host = 0; host < hosts; ++host) {
    for (const auto& column : columns) sent[host] += column->SentBytes(host);
  }
  return sent;
}

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
  // More than a piece.
  RunOnHosts({2, 2}, [](Communicator& group) { SumOnce<float>(group, 9'000'001, false, 4); });
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
        for (int place = 0; place < job[host]; ++place, ++rank) {
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

}  // namespace
