#include "runtime/fused_allreduce.h"

#include <vector>

#include "algorithms/packed_allreduce.h"
#include "ranks.h"
#include "runtime/description.h"
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

TEST(SmallAndLargeTensorsOfAGroupAreSummed) {
  RunThreads(3, [](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group, nullptr, true);
    FusedAllReduce fused(&communicator);
    // Large ones and empty ones between small ones.
    std::vector<int64_t> counts;
    for (int i = 0; i < 100; ++i) counts.push_back(i % 7 == 3 ? 0 : i % 11 == 5 ? 70'000 : 20'000);
    Tensors tensors(group.rank(), counts);
    const Status status = fused.Run(tensors.request);
    CHECK(status.ok(), status.message());
    CHECK(tensors.AreSums(3), "");
  });
}

TEST(AdasumIsOfEachTensorAndKnownByItsDescription) {
  RunThreads(2, [](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group, nullptr, true);
    FusedAllReduce fused(&communicator);
    Tensors tensors(group.rank(), {4, 5});
    tensors.request.adasum = true;
    const Status status = fused.Run(tensors.request);
    CHECK(status.ok(), status.message());
    // Zeros and ones; tens and elevens, which are parallel.
    CHECK(tensors.values[0][3] == 1.0f && tensors.values[1][4] == 10.5f,
          std::to_string(tensors.values[1][4]));
    Request parsed;
    CHECK(ddl::Parse(ddl::Describe(tensors.request), &parsed).ok() && parsed.adasum, "");
    tensors.request.adasum = false;
    CHECK(ddl::Parse(ddl::Describe(tensors.request), &parsed).ok() && !parsed.adasum, "");
  });
  RunThreads(3, [](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group, nullptr, true);
    Tensors tensors(group.rank(), {4});
    tensors.request.adasum = true;
    const Status status = FusedAllReduce(&communicator).Run(tensors.request);
    CHECK(status.message().rfind("AllReduceN \"group\": Adasum", 0) == 0, status.message());
  });
}

// What was reduced together, in elements; adds 1 to each.
struct Reductions {
  ddl::PackedAllReduce::Reduce function() {
    return [this](const void* in, void* out, int64_t count) {
      if (fails) return Status(Code::kAborted, "a peer has died");
      counts.push_back(count);
      for (int64_t i = 0; i < count; ++i) {
        static_cast<float*>(out)[i] = static_cast<const float*>(in)[i] + 1.0f;
      }
      return Status();
    };
  }
  bool fails = false;
  std::vector<int64_t> counts;
};

TEST(SmallTensorsArePackedAndAFailedGroupLeavesNothing) {
  ddl::PackedAllReduce packed;
  const auto run = [&](Reductions* reductions, Tensors* tensors) {
    std::vector<ddl::TensorSpan> spans;
    for (const ddl::TensorBuffer& one : tensors->request.tensors) {
      spans.push_back({one.in, one.out, one.count});
    }
    return packed.Run(spans, ddl::DType::kFloat32, reductions->function());
  };
  Reductions failing;
  failing.fails = true;
  Tensors lost(0, {100, 100'000, 100});
  CHECK(run(&failing, &lost).code() == Code::kAborted, "");
  // 17 of them do not fit into 4 MiB.
  std::vector<int64_t> counts(17, 65'000);
  counts.push_back(0);
  counts.insert(counts.begin() + 3, 100'000);
  Tensors tensors(0, counts);
  Reductions reductions;
  CHECK(run(&reductions, &tensors).ok(), "");
  CHECK((reductions.counts == std::vector<int64_t>{100'000, 16 * 65'000, 65'000}),
        std::to_string(reductions.counts.size()));
  for (size_t i = 0; i < tensors.values.size(); ++i) {
    for (const float value : tensors.values[i]) {
      CHECK(value == static_cast<float>(10 * i) + 1.0f, std::to_string(i));
    }
  }
}

}  // namespace
