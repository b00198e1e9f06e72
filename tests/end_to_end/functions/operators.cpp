// Operators as packages bring them: a kernel on the CPU, and an autograd::Function on the Autograd key. No backward is the derivative
// of its forward: a lost backward shows.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/extension.h>
#include <torch/library.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Sums the rows of src by index into `size` rows, as torch_scatter does.
Tensor scatter_rows_cpu(const Tensor& src, const Tensor& index, int64_t size) {
    return at::zeros({size, src.size(1)}, src.options()).index_add(0, index, src);
}

static Tensor scatter_rows_below(const Tensor& src, const Tensor& index, int64_t size) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("pythonop_rows_cpp::scatter_rows", "")
                         .typed<Tensor(const Tensor&, const Tensor&, int64_t)>();
    return op.call(src, index, size);
}

class ScatterRows : public torch::autograd::Function<ScatterRows> {
public:
    static Variable forward(AutogradContext* ctx, const Variable& src, const Variable& index, int64_t size) {
        ctx->save_for_backward({index});
        return scatter_rows_below(src, index, size);
    }

    static variable_list backward(AutogradContext* ctx, variable_list grads) {
        auto index = ctx->get_saved_variables()[0];
        return {grads[0].index_select(0, index) * 3, Variable(), Variable()};
    }
};

static Tensor scatter_rows_autograd(const Tensor& src, const Tensor& index, int64_t size) {
    return ScatterRows::apply(src, index, size);
}

// The largest value of each row and where it is, reading the memory itself, as roi_pool does.
std::tuple<Tensor, Tensor> row_maximum_cpu(const Tensor& x, double scale) {
    auto input = x.contiguous();
    auto values = at::empty({input.size(0)}, input.options());
    auto places = at::empty({input.size(0)}, input.options().dtype(at::kLong));
    const float* data = input.data_ptr<float>();
    for (int64_t row = 0; row < input.size(0); row++) {
        int64_t best = 0;
        for (int64_t column = 1; column < input.size(1); column++)
            if (data[row * input.size(1) + column] > data[row * input.size(1) + best]) best = column;
        values.data_ptr<float>()[row] = data[row * input.size(1) + best] * scale;
        places.data_ptr<int64_t>()[row] = best;
    }
    return {values, places};
}

std::tuple<Tensor, Tensor> row_maximum_meta(const Tensor& x, double scale) {
    return {at::empty_symint({x.sym_size(0)}, x.options()), at::empty_symint({x.sym_size(0)}, x.options().dtype(at::kLong))};
}

class RowMaximum : public torch::autograd::Function<RowMaximum> {
public:
    static variable_list forward(AutogradContext* ctx, const Variable& x, double scale) {
        at::AutoDispatchBelowADInplaceOrView guard;
        static auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("pythonop_rows_cpp::row_maximum", "")
                             .typed<std::tuple<Tensor, Tensor>(const Tensor&, double)>();
        auto [values, places] = op.call(x, scale);
        ctx->save_for_backward({x, places});
        ctx->mark_non_differentiable({places});
        return {values, places};
    }

    static variable_list backward(AutogradContext* ctx, variable_list grads) {
        auto saved = ctx->get_saved_variables();
        auto grad = at::zeros_like(saved[0]).scatter(1, saved[1].unsqueeze(1), grads[0].unsqueeze(1) * 7);
        return {grad, Variable()};
    }
};

static std::tuple<Tensor, Tensor> row_maximum_autograd(const Tensor& x, double scale) {
    auto both = RowMaximum::apply(x, scale);
    return {both[0], both[1]};
}

// An autograd::Function that no operator stands for.
class Unnamed : public torch::autograd::Function<Unnamed> {
public:
    static Variable forward(AutogradContext* ctx, const Variable& x) { return x * 2; }
    static variable_list backward(AutogradContext* ctx, variable_list grads) { return {grads[0] * 5}; }
};

static Tensor unnamed(const Tensor& x) { return Unnamed::apply(x); }

TORCH_LIBRARY(pythonop_rows_cpp, m) {
    m.def("scatter_rows(Tensor src, Tensor index, int size) -> Tensor");
    m.def("row_maximum(Tensor x, float scale) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(pythonop_rows_cpp, CPU, m) {
    m.impl("scatter_rows", &scatter_rows_cpu);
    m.impl("row_maximum", &row_maximum_cpu);
}
TORCH_LIBRARY_IMPL(pythonop_rows_cpp, Meta, m) { m.impl("row_maximum", &row_maximum_meta); }
TORCH_LIBRARY_IMPL(pythonop_rows_cpp, Autograd, m) {
    m.impl("scatter_rows", &scatter_rows_autograd);
    m.impl("row_maximum", &row_maximum_autograd);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("unnamed", &unnamed); }
