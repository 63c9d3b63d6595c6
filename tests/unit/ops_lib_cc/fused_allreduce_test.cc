#include "runtime/fused_allreduce.h"

#include <vector>

#include "ranks.h"
#include "thread_communicator.h"

namespace {

using ddl::Code;
using ddl::FusedAllReduce;
using ddl::Request;
using ddl::Status;

// Requests of float32 tensors, each filled with its number and the rank.
struct Tensors {
  Tensors(int rank, const std::vector<int64_t>& counts) {
    for (const int64_t count : counts) {
      const float value = static_cast<float>(10 * values.size() + rank);
      values.emplace_back(count, value);
    }
    for (std::vector<float>& one : values) {
      ddl::TensorBuffer buffer;
      buffer.in = buffer.out = one.data();
      buffer.count = static_cast<int64_t>(one.size());
      buffer.dims = {buffer.count};
      request.tensors.push_back(buffer);
    }
    request.op_name = "AllReduceN";
    request.name = "group";
  }

  // Whether tensor i holds what two ranks add up to.
  bool AreSums(int size) const {
    for (size_t i = 0; i < values.size(); ++i) {
      const float sum = static_cast<float>(10 * i) * size + size * (size - 1) / 2;
      for (const float value : values[i]) {
        if (value != sum) return false;
      }
    }
    return true;
  }

  std::vector<std::vector<float>> values;
  Request request;
};

// Fails what is reduced where it lies, as after the death of a peer.
class Failing : public ThreadCommunicator {
 public:
  explicit Failing(ddl::HostGroup* group) : ThreadCommunicator(group, nullptr, true) {}
  Status AllReduce(const void* in, void* out, int64_t count, ddl::DType dtype,
                   int divisor) override {
    if (fails) return Status(Code::kAborted, "a peer has died");
    return ThreadCommunicator::AllReduce(in, out, count, dtype, divisor);
  }
  bool fails = false;
};

TEST(SmallAndLargeTensorsOfAGroupAreSummed) {
  RunThreads(3, [](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group, nullptr, true);
    FusedAllReduce fused(&communicator);
    // More small ones than the buffer holds, large ones and empty ones between them.
    std::vector<int64_t> counts;
    for (int i = 0; i < 100; ++i) counts.push_back(i % 7 == 3 ? 0 : i % 11 == 5 ? 70'000 : 20'000);
    Tensors tensors(group.rank(), counts);
    const Status status = fused.Run(tensors.request);
    CHECK(status.ok(), status.message());
    CHECK(tensors.AreSums(3), "");
  });
}

TEST(WhatAFailedGroupLeftIsInNobodysWay) {
  RunThreads(2, [](ddl::HostGroup& group) {
    Failing communicator(&group);
    FusedAllReduce fused(&communicator);
    {
      // Sixteen that nearly fill the buffer, and a large one that fails.
      std::vector<int64_t> counts(16, 65'280);
      counts.push_back(100'000);
      Tensors tensors(group.rank(), counts);
      communicator.fails = true;
      CHECK(fused.Run(tensors.request).code() == Code::kAborted, "");
      communicator.fails = false;
    }
    Tensors small(group.rank(), {4'000, 4'000});
    ddl::SmallTensor together;
    CHECK(fused.Pack(small.request, &together), "");
    CHECK(together.count == 8'000, std::to_string(together.count));
    fused.Unpack(small.request);
    Tensors again(group.rank(), {100, 65'280, 70'000});
    const Status status = fused.Run(again.request);
    CHECK(status.ok(), status.message());
    CHECK(again.AreSums(2), "");
  });
}

}  // namespace
