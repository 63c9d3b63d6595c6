#ifndef DDL_ALGORITHMS_ALL_TO_ALL_H_
#define DDL_ALGORITHMS_ALL_TO_ALL_H_

#include <cstdint>
#include <vector>

#include "algorithms/range.h"
#include "core/status.h"
#include "transport/host_group.h"
#include "transport/transport.h"

namespace ddl {

// What each rank sends to each: a block of its input for every rank in their order, which ends as a
// block of theirs, in the order of the senders.
class Exchange {
 public:
  // nbytes[s * size + d] go from rank s to rank d; the same on every rank.
  Exchange(int rank, int size, std::vector<int64_t> nbytes);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t nbytes(int from, int to) const { return nbytes_[from * size_ + to]; }
  // Bytes of this rank's input for `rank`, and of its output from it.
  const Range& sent(int rank) const { return sent_[rank]; }
  const Range& received(int rank) const { return received_[rank]; }

  // The same of these ranks, as a rank of theirs is numbered among them: blocks lie where they lie
  // in the whole.
  std::vector<Range> SentTo(const std::vector<int>& ranks) const;
  std::vector<Range> ReceivedFrom(const std::vector<int>& ranks) const;
  // The most that one of them sends to another.
  int64_t Largest(const std::vector<int>& ranks) const;
  // The same without what ranks of one host send each other. `hosts`: the host of each rank.
  Exchange BetweenHosts(const std::vector<int>& hosts) const;

 private:
  const int rank_, size_;
  std::vector<int64_t> nbytes_;
  std::vector<Range> sent_, received_;
};

// A rank's blocks for itself do not travel: this copies it.
void KeepOwnBlock(const void* in, void* out, const Range& sent, const Range& received);

// Between the ranks of a host, in pieces through shared memory: a rank writes a block of each
// other's into it, while the others still read the piece before. `sent` and `received` are bytes of
// `in` and `out` by rank of the group, and `largest` as many as a rank sends to another at most, the
// same on all of them. Of S bytes each rank writes S and reads S, through the caches. Errors as
// HostGroup::Await; the group is broken then.
Status AllToAllInPieces(HostGroup* group, const void* in, void* out, const std::vector<Range>& sent,
                        const std::vector<Range>& received, int64_t largest);

// By messages, straight from `in` to `out`, in rounds: in each a rank sends a segment to all others
// at once, beginning with the next one, so that not all send to the same. `largest` as above: up to
// 64 MiB divided by the number of others there is one round. Where there are several, each pair of
// ranks has a message in each, of one byte where nothing is left. So a wait lasts no longer than two
// rounds, and no rank ends long before another, for which it would wait in the next collective.
Status AllToAllByMessages(Transport* transport, const void* in, void* out,
                          const std::vector<Range>& sent, const std::vector<Range>& received,
                          int64_t largest);

}  // namespace ddl

#endif  // DDL_ALGORITHMS_ALL_TO_ALL_H_
