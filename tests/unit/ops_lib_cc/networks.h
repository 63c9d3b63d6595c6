#ifndef DDL_TESTS_NETWORKS_H_
#define DDL_TESTS_NETWORKS_H_

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "transport/thread_transport.h"

// Runs `function` on `size` ranks, each a thread. Returns the bytes that each has sent.
inline std::vector<int64_t> RunOnNetwork(int size,
                                         const std::function<void(ddl::Transport&)>& function,
                                         double timeout_s = 60) {
  ddl::ThreadNetwork network(size, timeout_s);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const std::unique_ptr<ddl::Transport> transport = network.Join(rank);
      function(*transport);
    });
  }
  std::vector<int64_t> sent;
  for (int rank = 0; rank < size; ++rank) {
    threads[rank].join();
    sent.push_back(network.SentBytes(rank));
  }
  return sent;
}

#endif  // DDL_TESTS_NETWORKS_H_
