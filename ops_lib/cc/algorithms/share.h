#ifndef DDL_ALGORITHMS_SHARE_H_
#define DDL_ALGORITHMS_SHARE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ddl {

// Elements, or bytes, from `begin` up to `end`.
struct Share {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
};

// One of `shares` nearly equal parts of `count`.
inline Share ShareOf(int64_t count, int shares, int share) {
  const int64_t each = count / shares, rest = count % shares;
  const auto begin = [&](int64_t i) { return i * each + (i < rest ? i : rest); };
  return {begin(share), begin(share + 1)};
}

// Of the bytes of ranks one after the other.
inline std::vector<Share> OneAfterTheOther(const std::vector<int64_t>& nbytes) {
  std::vector<Share> shares;
  int64_t end = 0;
  for (const int64_t one : nbytes) {
    shares.push_back({end, end + one});
    end += one;
  }
  return shares;
}

// Bytes cut into `parts` ranges that begin at cache lines, counted from the begin of `whole`, so that
// no two ranks or threads write the same one. All are equally long but for the last ones, which may be
// empty.
inline std::vector<Share> CutAtLines(Share whole, int parts) {
  constexpr int64_t kLine = 64;
  const int64_t each = ((whole.count() + parts - 1) / parts + kLine - 1) / kLine * kLine;
  std::vector<Share> shares(parts);
  for (Share& share : shares) {
    share = {whole.begin, std::min(whole.begin + each, whole.end)};
    whole.begin = share.end;
  }
  return shares;
}

inline int64_t Total(const std::vector<Share>& shares) {
  int64_t nbytes = 0;
  for (const Share& share : shares) nbytes += share.count();
  return nbytes;
}

// Of each of them, one of `parts` such ranges.
inline std::vector<Share> CutEachAtLines(std::vector<Share> shares, int parts, int part) {
  for (Share& share : shares) share = CutAtLines(share, parts)[part];
  return shares;
}

}  // namespace ddl

#endif  // DDL_ALGORITHMS_SHARE_H_
