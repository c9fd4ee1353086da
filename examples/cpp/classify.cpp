// Classifies a photo with a model that zoo patched and AOTInductor compiled: no Python is there at run time.
//
//   classify model.pt2 photo.ppm [labels.txt]
//
// model.pt2 is what examples/export_package.py writes: pixels (H, W, 3) uint8 in, logits (1, classes) out; cutting,
// resizing and normalising are part of it. photo.ppm is a binary PPM of 8 bits, which ImageMagick, GIMP and Pillow
// write. labels.txt has the name of a class a line. Prints the five likeliest: index, logit, name.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// The next number of a PPM's header, past white space and comments.
long next_number(std::istream& file, const std::string& path) {
  for (int c = file.peek(); c == '#' || std::isspace(c); c = file.peek()) {
    if (c == '#') {
      std::string comment;
      std::getline(file, comment);
    } else {
      file.get();
    }
  }
  long value = -1;
  if (!(file >> value)) throw std::runtime_error(path + ": the header of the PPM is damaged");
  return value;
}

at::Tensor read_ppm(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be opened");
  std::string magic(2, '\0');
  file.read(magic.data(), 2);
  if (magic != "P6") throw std::runtime_error(path + ": got another format, expected a binary PPM (P6)");
  const long width = next_number(file, path), height = next_number(file, path), most = next_number(file, path);
  if (width < 1 || height < 1 || width > 1 << 15 || height > 1 << 15 || most != 255) {
    throw std::runtime_error(path + ": expected 1 to 32768 pixels a side, of 8 bits");
  }
  file.get();  // the one character of white space before the pixels
  at::Tensor pixels = at::empty({height, width, 3}, at::kByte);
  file.read(static_cast<char*>(pixels.data_ptr()), static_cast<std::streamsize>(pixels.numel()));
  if (file.gcount() != static_cast<std::streamsize>(pixels.numel())) {
    throw std::runtime_error(path + ": the file ends before its last pixel");
  }
  return pixels;
}

std::vector<std::string> read_labels(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + ": cannot be opened");
  std::vector<std::string> labels;
  for (std::string line; std::getline(file, line);) labels.push_back(line);
  return labels;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() < 2 || arguments.size() > 3) {
    std::cerr << "usage: classify model.pt2 photo.ppm [labels.txt]\n";
    return 2;
  }
  const auto labels = arguments.size() == 3 ? read_labels(arguments[2]) : std::vector<std::string>{};
  at::Tensor pixels = read_ppm(arguments[1]);
  if (!c10::Dispatcher::singleton().findSchema({"zoo::linear", ""})) {
    throw std::runtime_error("zoo's operators are not registered: the program was linked without zoo_ops");
  }
  if (!std::ifstream(arguments[0])) throw std::runtime_error(arguments[0] + ": cannot be opened");
  torch::inductor::AOTIModelPackageLoader loader(arguments[0]);
  auto metadata = loader.get_metadata();
  if (metadata["AOTI_DEVICE_KEY"] == "cuda") pixels = pixels.cuda();
  const at::Tensor logits = loader.run({pixels}).at(0).flatten().to(at::kCPU, at::kFloat);

  const int64_t count = std::min<int64_t>(5, logits.numel());
  const auto [values, indices] = logits.topk(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = indices[i].item<int64_t>();
    const bool named = index < static_cast<int64_t>(labels.size());
    const char* name = named ? labels[index].c_str() : "";
    std::printf("%5lld  %9.4f  %s\n", static_cast<long long>(index), values[i].item<float>(), name);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const c10::Error& error) {
    std::cerr << "classify: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "classify: " << error.what() << '\n';
    return 1;
  }
}
