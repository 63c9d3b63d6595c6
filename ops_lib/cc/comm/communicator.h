#ifndef DDL_COMM_COMMUNICATOR_H_
#define DDL_COMM_COMMUNICATOR_H_

#include <cstdint>
#include <vector>

#include "algorithms/all_to_all.h"
#include "algorithms/host_barrier.h"
#include "algorithms/tensor_list.h"
#include "comm/baseline.h"
#include "comm/messenger.h"
#include "core/dtype.h"
#include "core/reduction.h"
#include "core/status.h"

namespace ddl {

// The collectives that the engine asks of all ranks, beside the messages by which they agree. One
// thread uses it. They do not check that the ranks ask for the same thing: runtime/agreement does,
// before each.
class Communicator : public Messenger {
 public:
  virtual int local_rank() const = 0;  // among the ranks of this host
  virtual int local_size() const = 0;

  // How ranks reach each other, for messages: "shared memory".
  virtual const char* TransportName() const = 0;

  // Whether Barrier reduces the inline tensor; elsewhere BarrierResult::kMatch says nothing about
  // one.
  virtual bool ReducesInline() const { return false; }

  // See algorithms/host_barrier.h.
  virtual Status Barrier(const Arrival& arrival, BarrierResult* result) = 0;

  // out[i] = `reduction` over ranks of in[i], the same bits on every rank and in every run. float16
  // and bfloat16 are added, multiplied and divided in float32 and rounded once; over several hosts
  // with several ranks each, twice. Averages of integers of up to 32 bits are added in 64. `in` may
  // equal `out`.
  virtual Status AllReduce(const void* in, void* out, int64_t count, DType dtype,
                           Reduction reduction) = 0;

  // Every later call of this rank fails with `reason`, and as soon as they can know it, those of
  // the others: this rank could not go on in the middle of something.
  virtual void Break(const Status& reason) = 0;

  // Whether an error of this communicator has left messages under way. They may still be read from
  // and written to where they point, as long as the process lives.
  virtual bool HasAbandonedMessages() const = 0;

  // The same of each of many tensors.
  virtual Status AllReduceN(const std::vector<TensorSpan>& tensors, DType dtype,
                            Reduction reduction) = 0;

  // Overwrites `nbytes` at `buffer` with those of rank `root`.
  virtual Status Broadcast(void* buffer, int64_t nbytes, int root) = 0;

  // Writes the bytes of all ranks to `out`, one after the other; rank r contributes nbytes[r] from
  // its `in`. `nbytes` is the same on every rank.
  virtual Status AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) = 0;

  // The same of the shares of many tensors at once.
  virtual Status AllGatherN(const std::vector<SharedTensor>& tensors) {
    for (const SharedTensor& tensor : tensors) {
      std::vector<int64_t> nbytes;
      for (const Range& share : tensor.shares) nbytes.push_back(share.count());
      DDL_RETURN_IF_ERROR(AllGather(tensor.in, tensor.out, nbytes));
    }
    return Status();
  }

  // Each `out` gets this rank's share of `reduction` over ranks of the `in`, with the bits of an
  // AllReduce's halves: rounded once, or twice over several hosts with several ranks each. The
  // shares are whole elements. No `out` overlaps an `in`.
  virtual Status ReduceScatterN(const std::vector<SharedTensor>& tensors, DType dtype,
                                Reduction reduction) = 0;

  // Every rank gets a block of each. `in` and `out` do not overlap.
  virtual Status AllToAll(const void* in, void* out, const Exchange& exchange) = 0;

  // The same ranks' plain MPI; lives as long as this.
  virtual Baseline* baseline() = 0;
};

}  // namespace ddl

#endif  // DDL_COMM_COMMUNICATOR_H_
