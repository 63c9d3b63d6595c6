#ifndef DDL_TF_EAGER_NAMES_H_
#define DDL_TF_EAGER_NAMES_H_

#include <string>

namespace ddl {

// The names of eager collectives that have been asked for and have not begun. TensorFlow keeps a
// kernel for each value that an attribute of an eager op has ever had, and a loop may have a name
// for each of its steps. So the attribute `request` may be the number of a slot, of which there are
// as many as collectives begin at once, and the name is here; see ddl_name_eager.

// The name, in one line, by which the ranks know an op with this attribute. What lies in a slot is
// taken out.
std::string TakeName(const std::string& request);

}  // namespace ddl

#endif  // DDL_TF_EAGER_NAMES_H_
