#ifndef DDL_RUNTIME_GATHER_H_
#define DDL_RUNTIME_GATHER_H_

#include <cstdint>
#include <vector>

#include "algorithms/range.h"
#include "comm/communicator.h"
#include "comm/nccl_communicator.h"
#include "core/status.h"
#include "runtime/request.h"

namespace ddl {

// What ranks bring rows of a first dimension to, and take rows from.

// What this rank tells the others of a request of which they know all but first dimensions: those,
// and for kAllToAll its splits; of all ranks equally many. Every tensor has a first dimension.
std::vector<int64_t> NumbersOf(const Request& request, int size);

// What each rank gets of a tensor that is scattered, in bytes of it.
std::vector<Range> SharesOf(const Request& request, size_t tensor, int size);

// Joins the tensors of all ranks along the first dimension, in the order of the ranks.
//
// Three steps: the ranks exchange their first dimensions, but where `numbers` has what they told,
// rank by rank, and is not null; each allocates the result, and they tell
// each other whether they could, so that none waits for one that failed; then the tensors travel.
// The ranks have agreed on all but the first dimensions before. On every rank:
//   InvalidArgument  a tensor is a scalar
//   Internal         a rank could not allocate the result
//
// `nbytes` gets the size of the result. `gpus` brings what lies on GPUs.
Status Gather(Communicator* communicator, NcclCommunicator* gpus, const Request& request,
              const std::vector<int64_t>* numbers, int64_t* nbytes);

// Gives each rank some rows of every rank's one tensor, as the request's splits say, in the order of
// the ranks. In the same three steps, of which the first exchanges splits. On every rank:
//   InvalidInput  a rank's splits are none, or do not fit its rows; all are said which
//   Internal      as Gather
Status AllToAll(Communicator* communicator, const Request& request,
                const std::vector<int64_t>* numbers, int64_t* nbytes);

// Reduces each tensor and gives each rank its rows of it: equally many, and the first ranks one more
// where there is a rest. On every rank:
//   InvalidInput  a tensor is a scalar
Status ReduceScatter(Communicator* communicator, const Request& request, Reduction reduction);

}  // namespace ddl

#endif  // DDL_RUNTIME_GATHER_H_
