#ifndef DDL_COMM_ADASUM_H_
#define DDL_COMM_ADASUM_H_

#include <cstdint>
#include <vector>

#include "algorithms/range.h"
#include "algorithms/tensor_list.h"
#include "comm/communicator.h"
#include "core/dtype.h"
#include "core/status.h"

namespace ddl {

// Adds gradients of different directions, and averages those of the same. Of two vectors a and b
//   (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b,
// and so on, pair by pair: ranks 0 and 1, 2 and 3; then what these have, and so on. A vector of
// zeros is left out. Each tensor is a vector of its own. Its products are of float64: those of
// float64 numbers overflow from about 1e154 on, and vanish below 1e-154.
//
// By vector halving and distance doubling. In step s of log2(N) a rank and its partner, 2^s away,
// have the same part of two vectors, which 2^s ranks each hold together. They give each other one
// half, and each keeps both vectors' other half. The products of the parts are added up over the
// ranks, in float64, so that each knows those of the vectors, and computes its half. At the end
// each has an Nth, and all gather these.
//
// log2(N) exchanges, N numbers per tensor to reduce, and a gather: each rank sends 2 (N - 1) / N * S
// of S bytes. All that goes by the collectives of the communicator, so through shared memory on a
// host and by messages between hosts. float16 and bfloat16 are widened to float32 for the exchanges,
// and rounded once, at the end.
//
// Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020.
class Adasum {
 public:
  // `communicator` must outlive this object.
  // `together`: bytes of tensors that are taken at once, which bounds what lies beside them.
  explicit Adasum(Communicator* communicator, int64_t together = int64_t{64} << 20)
      : communicator_(communicator), together_(together) {}

  // Fills each `out`, which may be `in`, the same bits on every rank. InvalidInput on every rank if
  // their number is no power of two, or for integers; the group goes on then.
  Status Run(const std::vector<TensorSpan>& tensors, DType dtype);

 private:
  // `Number`: what is computed in and travels.
  template <typename Number>
  Status RunTogether(const std::vector<TensorSpan>& tensors, DType dtype);

  Communicator* const communicator_;
  const int64_t together_;
  // Kept, so that an error that leaves messages under way leaves them their memory.
  std::vector<char> mine_, theirs_, gathered_;
  std::vector<double> products_;
};

}  // namespace ddl

#endif  // DDL_COMM_ADASUM_H_
