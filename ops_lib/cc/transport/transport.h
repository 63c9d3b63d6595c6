#ifndef DDL_TRANSPORT_TRANSPORT_H_
#define DDL_TRANSPORT_TRANSPORT_H_

#include <cstdint>
#include <memory>

#include "core/status.h"

namespace ddl {

// Messages between ranks, two at a time: what the algorithms between hosts are written against. One
// thread of each rank uses it at a time.
//
// Messages from one rank to another arrive in the order they were sent, and each is received with
// exactly its length. There are no tags: ranks run one collective at a time and agree on it before.
// A message of no bytes is none: nothing is sent and nothing waited for.
//
// Send and Receive begin and return at once. The bytes belong to the transport until they are
// awaited: those sent must not change, those to come must not be looked at.
//
// Errors of the calls that wait, on this rank; the others find out by waiting for it:
//   Aborted           the peer has ended
//   DeadlineExceeded  the peer did nothing for as long as the timeout
//   Internal          messages and what was expected differ, or the network failed
//   Cancelled         another thread of this rank has called Interrupt
// After an error the ranks cannot get back into step: every later call answers with that error, and
// the bytes of messages under way may still be read and written until the transport is destroyed,
// or the process ends.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  virtual Status Send(int peer, const void* bytes, int64_t nbytes) = 0;
  virtual Status Receive(int peer, void* bytes, int64_t nbytes) = 0;

  // Waits for the oldest message that was to be received and has not been awaited.
  virtual Status AwaitReceive() = 0;

  // Waits until at most `pending` of the messages sent are still under way, the last ones.
  virtual Status AwaitSends(int64_t pending) = 0;

  // From now on whatever would have to wait ends with Cancelled, also what waits now: this rank
  // will not go on, and what it waits for may never come. Any thread may call it.
  virtual void Interrupt() = 0;

  // Whether an error has left messages under way.
  virtual bool HasAbandonedMessages() const { return false; }

  // So many bytes to receive into, until the next call. After an error they live on with the
  // transport: an algorithm that fails must not free what messages may still be written to.
  char* Scratch(int64_t nbytes) {
    if (broken_.ok() && nbytes > scratch_nbytes_) {
      scratch_.reset(new char[nbytes]);
      scratch_nbytes_ = nbytes;
    }
    return scratch_.get();
  }

  // Both directions at once, to the end.
  Status Exchange(int to, const void* sent, int64_t sent_nbytes, int from, void* received,
                  int64_t received_nbytes) {
    DDL_RETURN_IF_ERROR(Receive(from, received, received_nbytes));
    DDL_RETURN_IF_ERROR(Send(to, sent, sent_nbytes));
    DDL_RETURN_IF_ERROR(AwaitReceive());
    return AwaitSends(0);
  }

 protected:
  static Status Interrupted() {
    return Status(Code::kCancelled, "This rank has stopped in the middle of a collective.");
  }

  Status broken_;  // the error that stays
  std::unique_ptr<char[]> scratch_;
  int64_t scratch_nbytes_ = 0;
};

}  // namespace ddl

#endif  // DDL_TRANSPORT_TRANSPORT_H_
