#ifndef DDL_TESTS_HOSTS_H_
#define DDL_TESTS_HOSTS_H_

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "algorithms/direct_reduce_scatter.h"
#include "algorithms/network_allreduce.h"
#include "algorithms/packed_allreduce.h"
#include "algorithms/ring.h"
#include "check.h"
#include "comm/hosts_communicator.h"
#include "thread_communicator.h"
#include "transport/thread_transport.h"

// What the ranks of these tests need of the group below: who they are.
class BaseCommunicator : public ThreadCommunicator {
 public:
  BaseCommunicator(int rank, int size, Mailboxes* mailboxes,
                   std::unique_ptr<ddl::Transport> transport = nullptr)
      : ThreadCommunicator(nullptr, mailboxes),
        rank_(rank),
        size_(size),
        transport_(std::move(transport)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void Break(const ddl::Status&) override {}
  ddl::Status AllToAll(const void* in, void* out, const ddl::Exchange& exchange) override {
    std::vector<int> all(size_);
    std::iota(all.begin(), all.end(), 0);
    return ddl::AllToAllByMessages(transport_.get(), in, out, exchange.SentTo(all),
                                   exchange.ReceivedFrom(all), exchange.Largest(all));
  }

  ddl::Status AllReduceN(const std::vector<ddl::TensorSpan>& tensors, ddl::DType dtype,
                         ddl::Reduction reduction) override {
    return packed_.Run(tensors, dtype, [&](const void* in, void* out, int64_t count) {
      return ddl::NetworkAllReduce(transport_.get(), in, out, count, dtype, reduction, count);
    });
  }

  ddl::Status ReduceScatterN(const std::vector<ddl::SharedTensor>& tensors, ddl::DType dtype,
                             ddl::Reduction reduction) override {
    for (const ddl::SharedTensor& one : tensors) {
      const ddl::Status status = ddl::DirectReduceScatter(transport_.get(), one.in, one.out,
                                                          one.shares, dtype, reduction);
      if (!status.ok()) return status;
    }
    return ddl::Status();
  }

  ddl::Status AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) override {
    return ddl::RingAllGather(transport_.get(), in, out, ddl::ConsecutiveRanges(nbytes));
  }

 private:
  const int rank_, size_;
  const std::unique_ptr<ddl::Transport> transport_;
  ddl::PackedAllReduce packed_;
};

// Runs `function` on ranks_on[h] ranks of each host h, each with so many channels. Returns the
// bytes of tensors that each host has sent between the ranks with the same number on theirs;
// `past_columns` gets those that each rank has sent else.
inline std::vector<int64_t> RunOnHosts(
    const std::vector<int>& ranks_on, const std::function<void(ddl::Communicator&)>& function,
    double timeout_s = 60, Mailboxes* mailboxes = nullptr, int channels = 1,
    std::vector<int64_t>* past_columns = nullptr) {
  Mailboxes own;
  if (mailboxes == nullptr) mailboxes = &own;
  const int hosts = static_cast<int>(ranks_on.size());
  const int shares = *std::min_element(ranks_on.begin(), ranks_on.end());
  const int size = std::accumulate(ranks_on.begin(), ranks_on.end(), 0);
  std::vector<std::unique_ptr<ddl::ThreadNetwork>> networks;
  for (int share = 0; share < shares; ++share) {
    networks.push_back(std::make_unique<ddl::ThreadNetwork>(hosts, Paced(timeout_s)));
  }
  ddl::ThreadNetwork all(size, Paced(timeout_s));  // what ranks send past their columns
  std::vector<std::unique_ptr<void, void (*)(void*)>> memories;
  std::vector<int> host_of;
  for (const int ranks : ranks_on) {
    host_of.insert(host_of.end(), ranks, static_cast<int>(memories.size()));
    const int64_t nbytes = ddl::HostGroup::Nbytes(ranks);
    memories.emplace_back(std::aligned_alloc(4096, channels * nbytes), std::free);
    for (int channel = 0; channel < channels; ++channel) {
      ddl::HostGroup::Format(static_cast<char*>(memories.back().get()) + channel * nbytes, ranks);
    }
  }
  std::vector<std::thread> threads;
  for (int host = 0, rank = 0; host < hosts; ++host) {
    for (int rank_on_host = 0; rank_on_host < ranks_on[host]; ++rank_on_host, ++rank) {
      threads.emplace_back([&, host, rank_on_host, rank] {
        auto memory = std::make_unique<ddl::HostMemory>();
        std::vector<int> global_ranks(ranks_on[host]);
        std::iota(global_ranks.begin(), global_ranks.end(), rank - rank_on_host);
        memory->group =
            std::make_unique<ddl::HostGroup>(memories[host].get(), rank_on_host, ranks_on[host],
                                             Paced(timeout_s), global_ranks);
        std::vector<void*> others;
        for (int channel = 1; channel < channels; ++channel) {
          others.push_back(static_cast<char*>(memories[host].get()) +
                           channel * ddl::HostGroup::Nbytes(ranks_on[host]));
        }
        memory->channels =
            std::make_unique<ddl::HostChannels>(memory->group.get(), others, global_ranks);
        ddl::HostsCommunicator communicator(
            std::make_unique<BaseCommunicator>(rank, size, mailboxes, all.Join(rank)),
            std::move(memory),
            rank_on_host < shares ? networks[rank_on_host]->Join(host) : nullptr, shares, host_of);
        function(communicator);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; past_columns != nullptr && rank < size; ++rank) {
    past_columns->push_back(all.SentBytes(rank));
  }
  std::vector<int64_t> sent(hosts, 0);
  for (int host = 0; host < hosts; ++host) {
    for (const auto& network : networks) sent[host] += network->SentBytes(host);
  }
  return sent;
}

#endif  // DDL_TESTS_HOSTS_H_
