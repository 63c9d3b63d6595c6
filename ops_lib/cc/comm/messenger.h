#ifndef DDL_COMM_MESSENGER_H_
#define DDL_COMM_MESSENGER_H_

#include <string>
#include <utility>

#include "core/status.h"

namespace ddl {

// Whose messages they are; those of one never get among those of another.
enum class Channel { kAgreement, kBarrier };

// Short messages between the ranks of a job, by which they agree. One thread uses it.
class Messenger {
 public:
  virtual ~Messenger() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Hands `message` over and returns at once; messages to one peer over one channel
  // arrive in order.
  virtual Status Send(int peer, std::string message, Channel channel) = 0;

  // Takes the next message of `peer` if one is there. Never waits.
  virtual Status TryReceive(int peer, std::string* message, bool* received, Channel channel) = 0;

  // The same of any peer, whose messages nobody takes one by one over this channel; `peer` is -1 if
  // there is none.
  virtual Status TryReceiveAny(int* peer, std::string* message, Channel channel) = 0;

  Status Send(int peer, std::string message) {
    return Send(peer, std::move(message), Channel::kAgreement);
  }
  Status TryReceive(int peer, std::string* message, bool* received) {
    return TryReceive(peer, message, received, Channel::kAgreement);
  }
};

}  // namespace ddl

#endif  // DDL_COMM_MESSENGER_H_
