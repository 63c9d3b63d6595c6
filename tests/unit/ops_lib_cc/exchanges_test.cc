// Collectives of which each rank gets something else: between the ranks of a host, and between hosts.

#include "algorithms/all_to_all.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "algorithms/direct_reduce_scatter.h"
#include "algorithms/pieces.h"
#include "core/half.h"
#include "networks.h"
#include "ranks.h"
#include "values.h"

namespace {

using ddl::DType;
using ddl::Range;
using ddl::SharedTensor;

constexpr int64_t kPiece = ddl::HostGroup::kPieceBytes;

// What a rank sends to each: none, a few, to and from one alone, more than a piece, and so much that
// it is written past the caches, where that begins at no cache line.
constexpr int kLarge = 6;
std::vector<int64_t> TrafficOf(int size, int kind) {
  std::vector<int64_t> nbytes(static_cast<size_t>(size) * size);
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      nbytes[from * size + to] =
          kind == 0   ? 0
          : kind == 1 ? 1 + from
          : kind == 2 ? (from * 7 + to * 13) % 5 * 1001
          : kind == 3 ? (to == size - 1 ? 2 * kPiece + 17 * from : 0)
          : kind == 4 ? (from == 0 ? kPiece / size + to : 0)
          : kind < kLarge ? kPiece / size * 5 + from - to
                      : (int64_t{17} << 20) / size + 3 * from + to;
    }
  }
  return nbytes;
}

// Byte `at` of what `from` sends to `to`.
char ByteOf(int from, int to, int64_t at) {
  return static_cast<char>(at * 31 + from * 7 + to * 101 + at / 251);
}

// Runs `move` on the bytes of one rank and looks at what has come.
void ExchangeOnce(int rank, int size, int kind,
                  const std::function<ddl::Status(const void*, void*, const ddl::Exchange&)>& move) {
  const ddl::Exchange exchange(rank, size, TrafficOf(size, kind));
  std::vector<char> in(exchange.sent(size - 1).end), out(exchange.received(size - 1).end + 1, 99);
  for (int to = 0; to < size; ++to) {
    const Range block = exchange.sent(to);
    for (int64_t i = 0; i < block.count(); ++i) in[block.begin + i] = ByteOf(rank, to, i);
  }
  const ddl::Status status = move(in.data(), out.data(), exchange);
  const std::string where = "rank " + std::to_string(rank) + " of " + std::to_string(size) +
                            ", traffic " + std::to_string(kind);
  CHECK(status.ok(), where + ": " + status.message());
  for (int from = 0; from < size; ++from) {
    const Range block = exchange.received(from);
    for (int64_t i = 0; i < block.count(); ++i) {
      CHECK(out[block.begin + i] == ByteOf(from, rank, i), where);
    }
  }
  CHECK(out.back() == 99, where);
}

std::vector<int> AllOf(int size) {
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void ExchangesOnHost(ddl::HostGroup& group) {
  const std::vector<int> all = AllOf(group.size());
  for (int kind = 0; kind < 6; ++kind) {
    ExchangeOnce(group.rank(), group.size(), kind,
                 [&](const void* in, void* out, const ddl::Exchange& exchange) {
                   return ddl::AllToAllInPieces(&group, in, out, exchange.SentTo(all),
                                                exchange.ReceivedFrom(all), exchange.Largest(all));
                 });
    // What follows is right.
    float one = 1;
    const ddl::Status status =
        ddl::AllReduceInPieces(&group, &one, &one, 1, DType::kFloat32, 1);
    CHECK(status.ok() && one == static_cast<float>(group.size()), status.message());
  }
}

TEST(LargeExchangesOnAHostAreExact) {
  RunThreads(2, [](ddl::HostGroup& group) {
    const std::vector<int> all = AllOf(group.size());
    ExchangeOnce(group.rank(), group.size(), kLarge,
                 [&](const void* in, void* out, const ddl::Exchange& exchange) {
                   return ddl::AllToAllInPieces(&group, in, out, exchange.SentTo(all),
                                                exchange.ReceivedFrom(all), exchange.Largest(all));
                 });
  });
}

TEST(ExchangesOnAHostAreExact) {
  for (int size = 1; size <= 5; ++size) RunThreads(size, ExchangesOnHost);
  RunProcesses(3, ExchangesOnHost);
}

TEST(ExchangesBetweenHostsAreExact) {
  for (int size = 1; size <= 5; ++size) {
    const std::vector<int64_t> sent = RunOnNetwork(size, [](ddl::Transport& transport) {
      const std::vector<int> all = AllOf(transport.size());
      for (int kind = 0; kind < 6; ++kind) {
        ExchangeOnce(transport.rank(), transport.size(), kind,
                     [&](const void* in, void* out, const ddl::Exchange& exchange) {
                       const int rank = transport.rank();
                       ddl::KeepOwnBlock(in, out, exchange.sent(rank), exchange.received(rank));
                       return ddl::AllToAllByMessages(&transport, in, out, exchange.SentTo(all),
                                                      exchange.ReceivedFrom(all),
                                                      exchange.Largest(all));
                     });
      }
    });
    for (int rank = 0; rank < size; ++rank) {  // each byte once, and none to itself
      int64_t want = 0;
      for (int kind = 0; kind < 6; ++kind) {
        const std::vector<int64_t> nbytes = TrafficOf(size, kind);
        for (int to = 0; to < size; ++to) want += to == rank ? 0 : nbytes[rank * size + to];
      }
      CHECK(sent[rank] == want, std::to_string(sent[rank]));
    }
  }
}

// In several rounds, in which most of the pairs have nothing left.
TEST(LargeExchangesBetweenHostsAreExact) {
  constexpr int kSize = 4;
  std::vector<int64_t> nbytes(kSize * kSize, 0);
  nbytes[0 * kSize + 1] = (int64_t{43} << 20) + 5;
  nbytes[1 * kSize + 3] = (int64_t{64} << 20) / (kSize - 1);
  nbytes[3 * kSize + 0] = 1000;
  const std::vector<int64_t> sent = RunOnNetwork(kSize, [&](ddl::Transport& transport) {
    const int rank = transport.rank();
    const ddl::Exchange exchange(rank, kSize, nbytes);
    std::vector<char> in(exchange.sent(kSize - 1).end), out(exchange.received(kSize - 1).end);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<char>(i * 31 + i / 251 + rank);
    const std::vector<int> all = AllOf(kSize);
    const ddl::Status status =
        ddl::AllToAllByMessages(&transport, in.data(), out.data(), exchange.SentTo(all),
                                exchange.ReceivedFrom(all), exchange.Largest(all));
    CHECK(status.ok(), status.message());
    const int from = (std::vector<int>{3, 0, 0, 1})[rank];
    for (size_t i = 0; i < out.size(); ++i) {
      CHECK(out[i] == static_cast<char>(i * 31 + i / 251 + from), "rank " + std::to_string(rank));
    }
  });
  // Three rounds: a byte to each other one where there is nothing to send.
  CHECK(sent[0] == nbytes[1] + 6 && sent[1] == nbytes[7] + 8 && sent[2] == 9 && sent[3] == 1008,
        std::to_string(sent[0]) + " " + std::to_string(sent[1]) + " " + std::to_string(sent[2]) +
            " " + std::to_string(sent[3]));
}

// One rank of many, whose others always answer at once. No bytes move.
class CountingTransport : public ddl::Transport {
 public:
  explicit CountingTransport(int size) : size_(size) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }
  ddl::Status Send(int, const void*, int64_t nbytes) override {
    total += nbytes;
    sent_ += nbytes;
    return ddl::Status();
  }
  ddl::Status Receive(int, void*, int64_t) override { return ddl::Status(); }
  ddl::Status AwaitReceive() override {
    most_at_once = std::max(most_at_once, sent_);
    sent_ = 0;
    return ddl::Status();
  }
  ddl::Status AwaitSends(int64_t) override { return ddl::Status(); }
  void Interrupt() override {}

  int64_t total = 0, most_at_once = 0;

 private:
  const int size_;
  int64_t sent_ = 0;
};

TEST(RoundsBetweenHostsKeepTheirLimitWhateverTheNumberOfRanks) {
  for (const int size : {2, 257, 258, 2000}) {
    constexpr int64_t kRound = int64_t{64} << 20;
    const int64_t nbytes = 3 * kRound / (size - 1);
    std::vector<char> in(nbytes), out(nbytes);
    std::vector<Range> ranges(size, Range{0, nbytes});
    ranges[0] = {};
    CountingTransport transport(size);
    CHECK(ddl::AllToAllByMessages(&transport, in.data(), out.data(), ranges, ranges, nbytes).ok(),
          "");
    const std::string where = std::to_string(size) + " ranks: ";
    CHECK(transport.total >= nbytes * (size - 1), where + std::to_string(transport.total));
    // The first two are begun together.
    CHECK(transport.most_at_once <= 2 * kRound, where + std::to_string(transport.most_at_once));
  }
}

TIMED_TEST(DeathOfARankEndsAnExchange) {
  RunProcesses(
      3,
      [](ddl::HostGroup& group) {
        if (group.rank() == 1) _exit(0);
        const std::vector<Range> ranges(3, Range{0, 10'000});
        std::vector<char> in(10'000), out(10'000);
        const ddl::Status status =
            ddl::AllToAllInPieces(&group, in.data(), out.data(), ranges, ranges, 10'000);
        CHECK(status.code() == ddl::Code::kAborted, status.message());
        CHECK(status.message().find("rank 1") != std::string::npos, status.message());
      },
      20, 1);
}

// Shares of several tensors: rows of `sizes` elements each, as a reduce-scatter of them has.
std::vector<std::vector<Range>> SharesOf(const std::vector<int64_t>& counts, int size,
                                         int64_t element) {
  std::vector<std::vector<Range>> all;
  for (const int64_t count : counts) {
    std::vector<Range> shares;
    for (int rank = 0; rank < size; ++rank) {
      const Range part = ddl::EqualPart(count, size, rank);
      shares.push_back({part.begin * element, part.end * element});
    }
    all.push_back(shares);
  }
  return all;
}

const std::vector<std::vector<int64_t>> kGroups = {
    {}, {0}, {1}, {7, 0, 1, 33}, {70'001}, {5, 200'003, 2, 16, 100'000}};

template <typename T>
void ScatterOnce(int rank, int size, const std::vector<int64_t>& counts, int divisor,
                 const std::function<ddl::Status(const std::vector<SharedTensor>&)>& reduce) {
  const auto shares = SharesOf(counts, size, sizeof(T));
  std::vector<std::vector<T>> ins, outs;
  std::vector<SharedTensor> tensors;
  for (size_t i = 0; i < counts.size(); ++i) {
    ins.push_back(ValuesOf<T>(counts[i], rank, size));
    outs.emplace_back(shares[i][rank].count() / static_cast<int64_t>(sizeof(T)) + 1, T{77});
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    tensors.push_back({ins[i].data(), outs[i].data(), shares[i]});
  }
  const ddl::Status status = reduce(tensors);
  CHECK(status.ok(), status.message());
  for (size_t i = 0; i < counts.size(); ++i) {
    const int64_t first = shares[i][rank].begin / static_cast<int64_t>(sizeof(T));
    CheckTotals(outs[i].data(), static_cast<int64_t>(outs[i].size()) - 1, first, size, divisor,
                "tensor " + std::to_string(i) + " of rank " + std::to_string(rank));
    CHECK(outs[i].back() == T{77}, "beyond the end");
    CHECK(Same(ins[i], ValuesOf<T>(counts[i], rank, size)), "the input has changed");
  }
}

TEST(SharesOfManyTensorsAreReducedOnAHost) {
  for (int size = 1; size <= 4; ++size) {
    RunThreads(size, [](ddl::HostGroup& group) {
      for (const std::vector<int64_t>& counts : kGroups) {
        const auto reduce = [&](DType dtype, int divisor) {
          return [&group, dtype, divisor](const std::vector<SharedTensor>& tensors) {
            const ddl::ShareList list = ddl::ShareList::Scattered(tensors, group.rank());
            return ddl::ReduceScatterInPieces(&group, list.tensors(), list.ranges(), dtype,
                                              divisor);
          };
        };
        ScatterOnce<float>(group.rank(), group.size(), counts, group.size(),
                           reduce(DType::kFloat32, group.size()));
        ScatterOnce<int64_t>(group.rank(), group.size(), counts, 1, reduce(DType::kInt64, 1));
      }
    });
  }
}

TEST(SharesAreReducedBetweenHosts) {
  for (int size = 1; size <= 5; ++size) {
    RunOnNetwork(size, [](ddl::Transport& transport) {
      const int rank = transport.rank(), size = transport.size();
      // The last one in several pieces.
      for (const int64_t count : {0, 1, 1000, 900'001}) {
        ScatterOnce<float>(rank, size, {count}, size, [&](const std::vector<SharedTensor>& one) {
          return ddl::DirectReduceScatter(&transport, one[0].in, one[0].out, one[0].shares,
                                          DType::kFloat32, size);
        });
      }
    });
  }
}

TEST(SharesOfManyTensorsAreGatheredOnAHost) {
  for (int size = 1; size <= 4; ++size) {
    RunThreads(size, [](ddl::HostGroup& group) {
      const int rank = group.rank(), size = group.size();
      for (const std::vector<int64_t>& counts : kGroups) {
        const auto shares = SharesOf(counts, size, sizeof(int32_t));
        std::vector<std::vector<int32_t>> ins, outs;
        std::vector<SharedTensor> tensors;
        for (size_t i = 0; i < counts.size(); ++i) {
          const Range own = ddl::EqualPart(counts[i], size, rank);
          ins.emplace_back(own.count());
          std::iota(ins[i].begin(), ins[i].end(), static_cast<int32_t>(own.begin + 1000 * i));
          outs.emplace_back(counts[i], -1);
        }
        for (size_t i = 0; i < counts.size(); ++i) {
          tensors.push_back({ins[i].data(), outs[i].data(), shares[i]});
        }
        const ddl::ShareList list = ddl::ShareList::Gathered(tensors, rank);
        const ddl::Status status =
            ddl::AllGatherInPieces(&group, list.tensors(), list.ranges(), nullptr);
        CHECK(status.ok(), status.message());
        for (size_t i = 0; i < counts.size(); ++i) {
          std::vector<int32_t> want(counts[i]);
          std::iota(want.begin(), want.end(), static_cast<int32_t>(1000 * i));
          CHECK(outs[i] == want, "tensor " + std::to_string(i));
        }
      }
    });
  }
}

// The order of additions shows in the bits: that of the ranks, on a host and between hosts.
TEST(BitsOfSharesAreThoseOfRankOrder) {
  constexpr int kSize = 4;
  constexpr int64_t kCount = 200'003;
  std::vector<std::vector<float>> inputs(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    std::mt19937 random(50 + rank);
    std::uniform_real_distribution<float> mantissa(-1, 1), exponent(-6, 6);
    for (int64_t i = 0; i < kCount; ++i) {
      inputs[rank].push_back(mantissa(random) * std::pow(10.0f, exponent(random)));
    }
  }
  std::vector<float> want = inputs[0];
  for (int rank = 1; rank < kSize; ++rank) {
    for (int64_t i = 0; i < kCount; ++i) want[i] += inputs[rank][i];
  }
  const auto shares = SharesOf({kCount}, kSize, sizeof(float))[0];
  const auto check = [&](int rank, const std::vector<float>& out, const ddl::Status& status) {
    CHECK(status.ok(), status.message());
    CHECK(std::memcmp(out.data(), want.data() + shares[rank].begin / 4, shares[rank].count()) == 0,
          "other bits");
  };
  RunThreads(kSize, [&](ddl::HostGroup& group) {
    std::vector<float> out(kCount);
    const std::vector<SharedTensor> one = {{inputs[group.rank()].data(), out.data(), shares}};
    const ddl::ShareList list = ddl::ShareList::Scattered(one, group.rank());
    const ddl::Status status =
        ddl::ReduceScatterInPieces(&group, list.tensors(), list.ranges(), DType::kFloat32, 1);
    check(group.rank(), out, status);
  });
  RunOnNetwork(kSize, [&](ddl::Transport& transport) {
    std::vector<float> out(kCount);
    const float* const in = inputs[transport.rank()].data();
    const ddl::Status status =
        ddl::DirectReduceScatter(&transport, in, out.data(), shares, DType::kFloat32, 1);
    check(transport.rank(), out, status);
  });
}

}  // namespace
