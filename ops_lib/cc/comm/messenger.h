#ifndef DDL_COMM_MESSENGER_H_
#define DDL_COMM_MESSENGER_H_

#include <string>

#include "core/status.h"

namespace ddl {

// Short messages between the ranks of a job, by which they agree. One thread uses it.
class Messenger {
 public:
  virtual ~Messenger() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Hands `message` over and returns at once; messages to one peer arrive in order.
  virtual Status Send(int peer, std::string message) = 0;

  // Takes the next message of `peer` if one is there. Never waits.
  virtual Status TryReceive(int peer, std::string* message, bool* received) = 0;
};

}  // namespace ddl

#endif  // DDL_COMM_MESSENGER_H_
