#include "runtime/inline_request.h"

#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ranks.h"
#include "runtime/gather.h"
#include "thread_communicator.h"

namespace {

using ddl::InlineRequest;
using ddl::InlineTensor;
using ddl::Request;
using Kind = ddl::Request::Kind;

// A request of float32 tensors of these rows of two elements, each with a number of its own.
struct Rows {
  Rows(Kind kind, int rank, const std::vector<int64_t>& rows) {
    for (const int64_t count : rows) {
      std::vector<float> in(2 * count);
      for (size_t i = 0; i < in.size(); ++i) in[i] = ValueAt(ins.size(), i, rank);
      outs.emplace_back(in.size(), -1.0f);
      ins.push_back(std::move(in));
    }
    for (size_t i = 0; i < ins.size(); ++i) {
      request.tensors.push_back({ins[i].data(), outs[i].data(), 2 * rows[i], {rows[i], 2}});
    }
    request.kind = kind;
  }
  static float ValueAt(size_t tensor, size_t index, int rank) {
    return static_cast<float>(1000 * tensor + 10 * index + rank);
  }

  std::vector<std::vector<float>> ins, outs;
  Request request;
};

// The agreement of ranks that ask for the same thing.
void Agree(ThreadCommunicator* communicator, const InlineTensor& tensor) {
  ddl::Arrival arrival;
  arrival.in = tensor.in;
  arrival.out = tensor.out;
  arrival.count = tensor.count;
  arrival.dtype = tensor.dtype;
  arrival.reduction = tensor.reduction;
  ddl::BarrierResult result = ddl::BarrierResult::kMismatch;
  const ddl::Status status = communicator->Barrier(arrival, &result);
  CHECK(status.ok() && result == ddl::BarrierResult::kMatch, status.message());
}

TEST(GroupsThatGoWithTheAgreementAreLaidSideBySide) {
  RunThreads(1, [](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group, nullptr, true);
    InlineRequest inlined(&communicator);
    InlineTensor together;
    Rows large(Kind::kAllReduce, 0, {50, 32'640, 35'000});
    CHECK(!inlined.Pack(large.request, &together), "too large for it");
    Rows small(Kind::kAllReduce, 0, {2'000, 0, 1'500});
    CHECK(inlined.Pack(small.request, &together), "");
    CHECK(together.count == 7'000, std::to_string(together.count));
    float* packed = static_cast<float*>(together.out);
    CHECK(packed[0] == 0.0f && packed[4'000] == 2000.0f, "in their order");
    for (int64_t i = 0; i < together.count; ++i) packed[i] += 1.0f;
    CHECK(inlined.Unpack(small.request), "");
    CHECK(small.outs[0][3'999] == 39'991.0f && small.outs[2][0] == 2001.0f, "and back again");
    small.request.adasum = true;
    CHECK(!inlined.Pack(small.request, &together), "its coefficients are of whole tensors");
  });
}

TEST(SmallReduceScattersAreDoneByTheAgreement) {
  RunThreads(3, [](ddl::HostGroup& group) {
    const int rank = group.rank();
    ThreadCommunicator communicator(&group, nullptr, true);
    InlineRequest inlined(&communicator);
    for (const bool average : {false, true}) {
      // Three and three and two rows of the first, one of the third on the first two ranks.
      Rows rows(Kind::kReduceScatter, rank, {8, 0, 2});
      rows.request.average = average;
      InlineTensor together;
      CHECK(inlined.Pack(rows.request, &together), "");
      Agree(&communicator, together);
      CHECK(inlined.Unpack(rows.request), "");
      const std::vector<std::vector<int64_t>> begins = {{0, 6, 12, 16}, {}, {0, 2, 4, 4}};
      for (const size_t tensor : {0, 2}) {
        const int64_t first = begins[tensor][rank], end = begins[tensor][rank + 1];
        for (int64_t i = 0; i < static_cast<int64_t>(rows.outs[tensor].size()); ++i) {
          const float sum = 3 * Rows::ValueAt(tensor, first + i, 1);
          const float want = first + i >= end ? -1.0f : average ? sum / 3 : sum;
          CHECK(rows.outs[tensor][i] == want, std::to_string(rows.outs[tensor][i]));
        }
      }
    }
    Rows scalar(Kind::kReduceScatter, rank, {1});
    scalar.request.tensors[0].dims = {};
    InlineTensor together;
    CHECK(!inlined.Pack(scalar.request, &together), "its error is that of the whole way");
  });
}

TEST(SmallBroadcastsAreDoneByTheAgreementBitForBit) {
  RunThreads(3, [](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group, nullptr, true);
    InlineRequest inlined(&communicator);
    for (int root = 0; root < 3; ++root) {
      Rows rows(Kind::kBroadcast, group.rank(), {3, 0, 1});
      for (const size_t tensor : {0, 2}) {
        float* const values = rows.ins[tensor].data();
        values[0] = -0.0f;
        values[1] = -std::numeric_limits<float>::quiet_NaN();
        if (group.rank() == root) std::memcpy(rows.outs[tensor].data(), values, 8);
      }
      // Words and a rest: three bytes of the last tensor.
      rows.request.dtype = ddl::DType::kUint8;
      rows.request.tensors[0].count = 8;
      rows.request.tensors[2].count = 3;
      rows.request.root = root;
      InlineTensor together;
      CHECK(inlined.Pack(rows.request, &together), "");
      Agree(&communicator, together);
      CHECK(inlined.Unpack(rows.request), "");
      CHECK(std::memcmp(rows.outs[0].data(), rows.ins[0].data(), 8) == 0, "");
      CHECK(std::memcmp(rows.outs[2].data(), rows.ins[2].data(), 3) == 0, "");
      CHECK(rows.outs[0][2] == -1.0f && rows.outs[2][1] != rows.ins[2][1], "and no byte more");
    }
    Rows large(Kind::kBroadcast, group.rank(), {4'096});
    InlineTensor together;
    CHECK(!inlined.Pack(large.request, &together), "a slot has less than 32 KiB");
  });
}

TEST(RowsAndSplitsOfAllRanksComeWithTheAgreement) {
  RunThreads(3, [](ddl::HostGroup& group) {
    const int rank = group.rank();
    ThreadCommunicator communicator(&group, nullptr, true);
    InlineRequest inlined(&communicator);
    Rows gathered(Kind::kAllGather, rank, {rank, 10'000, 7 * rank});
    InlineTensor together;
    CHECK(inlined.Pack(gathered.request, &together), "however large the tensors are");
    Agree(&communicator, together);
    CHECK(!inlined.Unpack(gathered.request), "the tensors do not");
    const std::vector<int64_t> rows = {0, 10'000, 0, 1, 10'000, 7, 2, 10'000, 14};
    CHECK(inlined.numbers() == rows, "");
    Rows split(Kind::kAllToAll, rank, {5});
    if (rank == 1) split.request.splits = {2, 0, 3};
    if (rank == 2) split.request.splits = {5};  // an error, which all ranks find
    CHECK(inlined.Pack(split.request, &together), "");
    Agree(&communicator, together);
    CHECK(!inlined.Unpack(split.request), "");
    CHECK(inlined.numbers() == std::vector<int64_t>({5, 0, 0, 0, 0, 5, 3, 2, 0, 3, 5, 1, 5, 0, 0}),
          "");
    const std::vector<int64_t> many(1'400, 1);  // of three ranks: more than a slot has room for
    Rows wide(Kind::kAllGather, rank, many);
    CHECK(!inlined.Pack(wide.request, &together), "");
  });
}

// Splits whose sum wraps around to the number of rows would be read and written.
TEST(SplitsThatDoNotFitAreAnErrorOnAllRanks) {
  constexpr int64_t kQuarter = int64_t{1} << 62;  // of all numbers
  const char kEach[] = "None may be negative or more than its rows.";
  const char kSum[] = "They must add up to its first dimension.";
  const std::vector<std::pair<std::vector<int64_t>, std::string>> unfit = {
      {{kQuarter, kQuarter, kQuarter, kQuarter, 4}, kEach},
      {{-1, 5, 0, 0, 0}, kEach},
      {{5, 0, 0, 0, 0}, kEach},
      {{1, 1, 1, 0, 0}, kSum}};
  RunThreads(5, [&](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group, nullptr, true);
    for (const auto& [splits, why] : unfit) {
      Rows rows(Kind::kAllToAll, group.rank(), {4});
      rows.request.allocate = [](const std::vector<int64_t>&, void**) {
        return ddl::Status(ddl::Code::kInternal, "they were taken");
      };
      std::vector<int64_t> numbers;  // of all ranks
      for (int rank = 0; rank < group.size(); ++rank) {
        const std::vector<int64_t> fit = {4, 0, 0, 0, 0}, &given = rank == 3 ? splits : fit;
        numbers.insert(numbers.end(), {4, group.size()});
        numbers.insert(numbers.end(), given.begin(), given.end());
      }
      int64_t nbytes = 0;
      const ddl::Status status = ddl::AllToAll(&communicator, rows.request, &numbers, &nbytes);
      CHECK(status.code() == ddl::Code::kInvalidInput &&
                status.message().find("rank 3 gave splits [") != std::string::npos &&
                status.message().find(" of 4 rows. " + why) != std::string::npos,
            status.message());
    }
  });
}

TEST(NothingGoesWithAnAgreementThatReducesNothing) {
  RunThreads(1, [](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group, nullptr, false);
    InlineRequest inlined(&communicator);
    InlineTensor together;
    for (const Kind kind : {Kind::kAllReduce, Kind::kBroadcast, Kind::kAllGather, Kind::kAllToAll}) {
      Rows rows(kind, 0, {1});
      CHECK(!inlined.Pack(rows.request, &together), "between hosts");
    }
  });
}

}  // namespace
