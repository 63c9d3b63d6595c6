#ifndef DDL_RUNTIME_DESCRIPTION_H_
#define DDL_RUNTIME_DESCRIPTION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/request.h"

namespace ddl {

// What a rank is about to do, in the form in which ranks compare it: op, name, options, then one
// line for each tensor.
std::string Describe(const Request& request);

// What of a description must be equal on all ranks for the collective to fit: all of it, but for
// the first dimensions of tensors that are gathered.
std::string Essence(const std::string& description);

// 128 bits that differ where descriptions do.
void Digest(const std::string& description, uint64_t digest[2]);

// `AllReduceN "loss/grads"`: op and name, for messages and to know a request by.
std::string Title(const std::string& description);
std::string Title(const Request& request);

// Ok if all descriptions (one for each rank) fit one collective. Else InvalidArgument with the
// first difference to rank 0: which tensor, which rank, what each of them asked for.
Status Compare(const std::vector<std::string>& descriptions);

}  // namespace ddl

#endif  // DDL_RUNTIME_DESCRIPTION_H_
