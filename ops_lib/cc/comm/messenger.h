#ifndef DDL_COMM_MESSENGER_H_
#define DDL_COMM_MESSENGER_H_

#include <string>
#include <utility>

#include "core/status.h"

namespace ddl {

// What messages belong to; those of one tag are never received as those of another.
enum class MessageTag { kAgreement, kBarrier };

// Short messages between the ranks of a job, by which they agree. One thread uses it.
class Messenger {
 public:
  virtual ~Messenger() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Hands `message` over and returns at once; messages with one tag to one peer
  // arrive in order.
  virtual Status Send(int peer, std::string message, MessageTag tag) = 0;

  // Takes the next message of `peer` if one is there. Never waits.
  virtual Status TryReceive(int peer, std::string* message, bool* received, MessageTag tag) = 0;

  // The same of any peer, whose messages with this tag nobody takes one by one; `peer` is -1 if
  // there is none.
  virtual Status TryReceiveAny(int* peer, std::string* message, MessageTag tag) = 0;

  // Waits until all that was sent no longer needs this rank: a long message goes on only while its
  // sender looks after it. For messages to ranks that wait for them.
  virtual Status Flush() = 0;

  Status Send(int peer, std::string message) {
    return Send(peer, std::move(message), MessageTag::kAgreement);
  }
  Status TryReceive(int peer, std::string* message, bool* received) {
    return TryReceive(peer, message, received, MessageTag::kAgreement);
  }
};

}  // namespace ddl

#endif  // DDL_COMM_MESSENGER_H_
