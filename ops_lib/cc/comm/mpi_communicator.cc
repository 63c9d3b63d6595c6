#include "comm/mpi_communicator.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/arithmetic.h"

namespace ddl {
namespace {

constexpr int kTag = 0;
// MPI counts are int; larger buffers go in pieces of this many elements or bytes.
constexpr int64_t kMaxCount = int64_t{1} << 30;
// Large tensors are reduced in pieces of this size, which stay in the caches between the steps of
// MPI's algorithm and the division. The cut depends on the size alone, so the order of additions,
// and with it every bit of the result, is the same on all ranks and in every run.
constexpr int64_t kPieceBytes = int64_t{4} << 20;

Status Check(int result, const char* call) {
  if (result == MPI_SUCCESS) return Status();
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(result, text, &length);
  return Status(Code::kInternal, std::string(call) + " failed: " + std::string(text, length) +
                                     ". See mpirun's output for the rank or host that was lost.");
}

MPI_Datatype ToMpi(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return MPI_FLOAT;
    case DType::kFloat64: return MPI_DOUBLE;
    case DType::kInt32: return MPI_INT32_T;
    case DType::kInt64: return MPI_INT64_T;
    default: return MPI_DATATYPE_NULL;
  }
}

}  // namespace

Status MpiCommunicator::OverWorld(std::unique_ptr<Communicator>* communicator) {
  std::unique_ptr<MpiCommunicator> made(new MpiCommunicator);
  DDL_RETURN_IF_ERROR(Check(MPI_Comm_dup(MPI_COMM_WORLD, &made->comm_), "MPI_Comm_dup"));
  MPI_Comm_set_errhandler(made->comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(made->comm_, &made->rank_);
  MPI_Comm_size(made->comm_, &made->size_);
  MPI_Comm host = MPI_COMM_NULL;
  DDL_RETURN_IF_ERROR(Check(
      MPI_Comm_split_type(made->comm_, MPI_COMM_TYPE_SHARED, made->rank_, MPI_INFO_NULL, &host),
      "MPI_Comm_split_type"));
  MPI_Comm_rank(host, &made->local_rank_);
  MPI_Comm_size(host, &made->local_size_);
  MPI_Comm_free(&host);
  *communicator = std::move(made);
  return Status();
}

MpiCommunicator::~MpiCommunicator() {
  // A message still pending here was meant for a rank that had gone.
  for (PendingSend& send : sends_) {
    MPI_Cancel(&send.request);
    MPI_Request_free(&send.request);
  }
  if (comm_ != MPI_COMM_NULL && sends_.empty()) MPI_Comm_free(&comm_);
}

Status MpiCommunicator::DropFinishedSends() {
  for (auto send = sends_.begin(); send != sends_.end();) {
    int finished = 0;
    DDL_RETURN_IF_ERROR(Check(MPI_Test(&send->request, &finished, MPI_STATUS_IGNORE), "MPI_Test"));
    send = finished ? sends_.erase(send) : std::next(send);
  }
  return Status();
}

Status MpiCommunicator::Send(int peer, std::string message) {
  sends_.push_back({std::move(message), MPI_REQUEST_NULL});
  PendingSend& send = sends_.back();
  DDL_RETURN_IF_ERROR(Check(MPI_Isend(send.message.data(), static_cast<int>(send.message.size()),
                                      MPI_BYTE, peer, kTag, comm_, &send.request),
                            "MPI_Isend"));
  return DropFinishedSends();
}

Status MpiCommunicator::TryReceive(int peer, std::string* message, bool* received) {
  *received = false;
  if (!sends_.empty()) DDL_RETURN_IF_ERROR(DropFinishedSends());
  int found = 0, nbytes = 0;
  MPI_Message handle;
  MPI_Status status;
  DDL_RETURN_IF_ERROR(
      Check(MPI_Improbe(peer, kTag, comm_, &found, &handle, &status), "MPI_Improbe"));
  if (!found) return Status();
  MPI_Get_count(&status, MPI_BYTE, &nbytes);
  message->resize(nbytes);
  DDL_RETURN_IF_ERROR(
      Check(MPI_Mrecv(message->data(), nbytes, MPI_BYTE, &handle, MPI_STATUS_IGNORE), "MPI_Mrecv"));
  *received = true;
  return Status();
}

Status MpiCommunicator::Meet(const Offer&, bool*) {
  return Status(Code::kInternal, "Ranks cannot meet over MPI.");
}

Status MpiCommunicator::AllReduce(const void* in, void* out, int64_t count, DType dtype,
                                  int divisor) {
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  const int64_t nbytes = count * element;
  for (int64_t first = 0; first < nbytes; first += kPieceBytes) {
    const int64_t n = std::min(kPieceBytes, nbytes - first) / element;
    char* to = static_cast<char*>(out) + first;
    DDL_RETURN_IF_ERROR(AllReduceBaseline(static_cast<const char*>(in) + first, to, n, dtype));
    if (divisor != 1) Divide(to, n, dtype, divisor);
  }
  return Status();
}

Status MpiCommunicator::AllReduceBaseline(const void* in, void* out, int64_t count, DType dtype) {
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  for (int64_t first = 0; first < count; first += kMaxCount) {
    const int n = static_cast<int>(std::min(kMaxCount, count - first));
    const void* from = in == out ? MPI_IN_PLACE : static_cast<const char*>(in) + first * element;
    DDL_RETURN_IF_ERROR(Check(MPI_Allreduce(from, static_cast<char*>(out) + first * element, n,
                                            ToMpi(dtype), MPI_SUM, comm_),
                              "MPI_Allreduce"));
  }
  return Status();
}

Status MpiCommunicator::Broadcast(void* buffer, int64_t nbytes) {
  return BroadcastFrom(0, buffer, nbytes);
}

Status MpiCommunicator::BroadcastFrom(int root, void* buffer, int64_t nbytes) {
  for (int64_t first = 0; first < nbytes; first += kMaxCount) {
    const int n = static_cast<int>(std::min(kMaxCount, nbytes - first));
    DDL_RETURN_IF_ERROR(
        Check(MPI_Bcast(static_cast<char*>(buffer) + first, n, MPI_BYTE, root, comm_),
              "MPI_Bcast"));
  }
  return Status();
}

Status MpiCommunicator::ExchangeShares(const void* in, void* out,
                                       const std::vector<int64_t>& nbytes) {
  const std::vector<int> sent(nbytes.begin(), nbytes.end());
  const std::vector<int> received(size_, sent[rank_]);
  std::vector<int> from(size_, 0), to(size_, 0);
  for (int rank = 1; rank < size_; ++rank) {
    from[rank] = from[rank - 1] + sent[rank - 1];
    to[rank] = to[rank - 1] + received[rank - 1];
  }
  return Check(MPI_Alltoallv(in, sent.data(), from.data(), MPI_BYTE, out, received.data(),
                             to.data(), MPI_BYTE, comm_),
               "MPI_Alltoallv");
}

Status MpiCommunicator::AllGather(const void* in, void* out, const std::vector<int64_t>& nbytes) {
  std::vector<int64_t> offsets(size_ + 1, 0);
  std::partial_sum(nbytes.begin(), nbytes.end(), offsets.begin() + 1);
  if (offsets[size_] <= kMaxCount) {
    const std::vector<int> counts(nbytes.begin(), nbytes.end());
    const std::vector<int> places(offsets.begin(), offsets.end() - 1);
    return Check(MPI_Allgatherv(in, counts[rank_], MPI_BYTE, out, counts.data(), places.data(),
                                MPI_BYTE, comm_),
                 "MPI_Allgatherv");
  }
  // Places are int as well, so a large result cannot be one call, in whatever units.
  char* all = static_cast<char*>(out);
  std::memcpy(all + offsets[rank_], in, nbytes[rank_]);
  for (int rank = 0; rank < size_; ++rank) {
    DDL_RETURN_IF_ERROR(BroadcastFrom(rank, all + offsets[rank], nbytes[rank]));
  }
  return Status();
}

}  // namespace ddl
