#ifndef DDL_TRANSPORT_THREAD_TRANSPORT_H_
#define DDL_TRANSPORT_THREAD_TRANSPORT_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/transport.h"

namespace ddl {

// Joins threads of one process as ranks: for tests, and to try an algorithm without a cluster.
//
// A message is copied once, from the sender's memory to the receiver's, when both have named theirs
// and not before. So an algorithm that reuses memory too early gets wrong results here as well.
class ThreadNetwork {
 public:
  // `timeout_s`: see Transport.
  ThreadNetwork(int size, double timeout_s);

  // The transport of one rank, once for each; its destruction is the end of the rank. The network
  // must outlive it.
  std::unique_ptr<Transport> Join(int rank);

  // Bytes that `rank` has sent so far, as far as they were received.
  int64_t SentBytes(int rank);

 private:
  friend class ThreadTransport;

  struct Message {
    char* bytes = nullptr;
    int64_t nbytes = 0;
    int peer = 0;
    bool done = false;
  };
  // The messages from one rank to another, oldest first: only one of the two holds any.
  struct Link {
    std::deque<std::shared_ptr<Message>> sent, awaited;
  };

  Link& link(int from, int to) { return links_[from * size_ + to]; }
  Status Match(int from, int to);

  const int size_;
  const double timeout_s_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<Link> links_;
  std::vector<bool> ended_;
  std::vector<int64_t> sent_nbytes_;
};

}  // namespace ddl

#endif  // DDL_TRANSPORT_THREAD_TRANSPORT_H_
