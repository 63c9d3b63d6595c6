#ifndef DDL_ALGORITHMS_RANGE_H_
#define DDL_ALGORITHMS_RANGE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ddl {

// Elements, or bytes, from `begin` up to `end`.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
};

// One of `parts` nearly equal parts of `count`.
inline Range EqualPart(int64_t count, int parts, int part) {
  const int64_t each = count / parts, rest = count % parts;
  const auto begin = [&](int64_t i) { return i * each + (i < rest ? i : rest); };
  return {begin(part), begin(part + 1)};
}

// The ranges of all ranks, one after the other, nbytes[r] of rank r.
inline std::vector<Range> ConsecutiveRanges(const std::vector<int64_t>& nbytes) {
  std::vector<Range> ranges;
  int64_t end = 0;
  for (const int64_t one : nbytes) {
    ranges.push_back({end, end + one});
    end += one;
  }
  return ranges;
}

// Bytes cut into `parts` ranges that begin at cache lines, counted from the beginning of `whole`,
// so that no two ranks or threads write the same one. All are equally long but for the last ones,
// which may be empty.
inline std::vector<Range> SplitAtCacheLines(Range whole, int parts) {
  constexpr int64_t kLine = 64;
  const int64_t each = ((whole.count() + parts - 1) / parts + kLine - 1) / kLine * kLine;
  std::vector<Range> ranges(parts);
  for (Range& range : ranges) {
    range = {whole.begin, std::min(whole.begin + each, whole.end)};
    whole.begin = range.end;
  }
  return ranges;
}

inline int64_t TotalSize(const std::vector<Range>& ranges) {
  int64_t nbytes = 0;
  for (const Range& range : ranges) nbytes += range.count();
  return nbytes;
}

// Of each of them, one of `parts` such ranges.
inline std::vector<Range> SplitEachAtCacheLines(std::vector<Range> ranges, int parts, int part) {
  for (Range& range : ranges) range = SplitAtCacheLines(range, parts)[part];
  return ranges;
}

}  // namespace ddl

#endif  // DDL_ALGORITHMS_RANGE_H_
