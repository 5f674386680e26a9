/* The C API from C: two tokens of the gated delta rule, whose result is worked out by hand, with
 * the launch's tensors allocated by what the operator says of them. */
#include <wyvern/wyvern.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 2, K = 16, V = 16, MOST_TENSORS = 64 };

/* Ends the program where a call failed. */
static void check(wyvern_status status) {
  if (status == WYVERN_OK) return;
  fprintf(stderr, "%s\n", wyvern_last_error());
  exit(3);
}

/* A tensor of the launch, on the host and on the device. */
typedef struct {
  wyvern_tensor_spec spec;
  wyvern_memory* memory;
  float* host;
} tensor;

typedef struct {
  tensor all[MOST_TENSORS];
  size_t count;
} tensors;

static wyvern_problem* make_problem(void) {
  wyvern_problem* problem;
  check(wyvern_problem_create("gated_delta_rule", &problem));
  check(wyvern_problem_set_int(problem, "T", T));
  check(wyvern_problem_set_int(problem, "K", K));
  check(wyvern_problem_set_int(problem, "V", V));
  check(wyvern_problem_set_text(problem, "dtype", "fp32"));
  check(wyvern_problem_set_text(problem, "beta_dtype", "fp32"));
  check(wyvern_problem_set_real(problem, "scale", 1.0));
  check(wyvern_problem_set_int(problem, "output_final_state", 1));
  return problem;
}

/* Memory for each tensor that the operator has, poisoned on the host. */
static void allocate(const wyvern_operator* op, const wyvern_device* device, tensors* made) {
  wyvern_tensor_spec specs[MOST_TENSORS];
  size_t count = 0;
  check(wyvern_operator_tensors(op, specs, sizeof specs[0], MOST_TENSORS, &count));
  if (count > MOST_TENSORS) exit(3);
  made->count = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!specs[i].present) continue;
    tensor* one = &made->all[made->count++];
    one->spec = specs[i];
    one->host = malloc(specs[i].bytes);
    if (one->host == NULL) exit(3);
    for (size_t j = 0; j < specs[i].bytes / sizeof(float); ++j) one->host[j] = NAN;
    check(wyvern_memory_create(device, specs[i].bytes, &one->memory));
  }
}

static void release(tensors* made) {
  for (size_t i = 0; i < made->count; ++i) {
    free(made->all[i].host);
    wyvern_memory_destroy(made->all[i].memory);
  }
}

static const tensor* find(const tensors* made, const char* name) {
  for (size_t i = 0; i < made->count; ++i)
    if (strcmp(made->all[i].spec.name, name) == 0) return &made->all[i];
  fprintf(stderr, "the operator has no %s\n", name);
  exit(3);
}

static float* host_of(const tensors* made, const char* name) { return find(made, name)->host; }

/* Both keys and queries are the first unit vector, so that only the state's first row is written.
 */
static void fill_inputs(const tensors* made) {
  for (int t = 0; t < T; ++t) {
    for (int i = 0; i < K; ++i) {
      host_of(made, "q")[t * K + i] = i == 0 ? 1.0F : 0.0F;
      host_of(made, "k")[t * K + i] = i == 0 ? 1.0F : 0.0F;
    }
    for (int i = 0; i < V; ++i) host_of(made, "v")[t * V + i] = 1.0F + (float)(t * V + i);
  }
  host_of(made, "beta")[0] = 0.5F;
  host_of(made, "beta")[1] = 1.0F;
  host_of(made, "g")[0] = 0.0F;
  host_of(made, "g")[1] = logf(0.5F);
}

static void launch(const wyvern_operator* op, const wyvern_device* device, const tensors* made) {
  wyvern_tensor given[MOST_TENSORS];
  for (size_t i = 0; i < made->count; ++i) {
    const tensor* one = &made->all[i];
    void* data = wyvern_memory_data(one->memory);
    check(wyvern_device_copy_in(device, data, one->host, one->spec.bytes));
    given[i].name = one->spec.name;
    given[i].data = data;
    given[i].shape = one->spec.shape;
    given[i].strides = NULL;
    given[i].dtype = one->spec.dtype;
    given[i].rank = one->spec.rank;
  }
  wyvern_launch what = WYVERN_LAUNCH_INIT;
  what.tensors = given;
  what.tensor_count = made->count;
  check(wyvern_operator_workspace_bytes(op, &what.workspace_bytes));
  wyvern_memory* workspace;
  check(wyvern_memory_create(device, what.workspace_bytes, &workspace));
  what.workspace = wyvern_memory_data(workspace);
  check(wyvern_operator_launch(op, &what));
  check(wyvern_device_synchronize(device, what.stream));
  wyvern_memory_destroy(workspace);
  for (size_t i = 0; i < made->count; ++i)
    check(wyvern_device_copy_out(device, made->all[i].host, wyvern_memory_data(made->all[i].memory),
                                 made->all[i].spec.bytes));
}

static int is_near(const char* name, int at, float value, float wanted) {
  if (fabsf(value - wanted) <= 1e-5F) return 1;
  printf("%s[%d] is %g, not %g\n", name, at, (double)value, (double)wanted);
  return 0;
}

/* u_0 = 0.5 v_0 and row = u_0; then row <- 0.5 row, u_1 = v_1 - row, row <- row + u_1 = v_1. */
static int outputs_are_right(const tensors* made) {
  const float *v = host_of(made, "v"), *o = host_of(made, "o");
  const float* state = host_of(made, "final_state");
  int good = 1;
  for (int i = 0; i < V; ++i) {
    good &= is_near("o", i, o[i], 0.5F * v[i]);
    good &= is_near("o", V + i, o[V + i], v[V + i]);
    good &= is_near("final_state", i, state[i], v[V + i]);
  }
  for (int i = V; i < K * V; ++i) good &= is_near("final_state", i, state[i], 0.0F);
  return good;
}

/* A stage says which tensors it takes as they are; others must be copied first. */
static int stage_is_asked(wyvern_runtime* runtime, const wyvern_device* device,
                          const wyvern_problem* problem, const tensor* k) {
  const int64_t strided_rows[] = {T * 2 * K, 2 * K, K, 1},
                elements_apart[] = {T * 2 * K, 2 * K, K, 2};
  wyvern_stage* stage;
  check(wyvern_prepare_stage(runtime, device, problem, "l2norm", &stage));
  wyvern_tensor x = {
      "x", wyvern_memory_data(k->memory), k->spec.shape, strided_rows, k->spec.dtype, k->spec.rank};
  int32_t rows = -1, elements = -1;
  check(wyvern_stage_takes(stage, &x, sizeof x, &rows));
  x.strides = elements_apart;
  check(wyvern_stage_takes(stage, &x, sizeof x, &elements));
  wyvern_stage_destroy(stage);
  if (rows == 1 && elements == 0) return 1;
  printf("rows apart: %d, not 1; elements apart: %d, not 0\n", (int)rows, (int)elements);
  return 0;
}

int main(int count, char** arguments) {
  if (wyvern_api_version() < WYVERN_API_VERSION) {
    fprintf(stderr, "Wyvern %s is too old\n", wyvern_version());
    return 3;
  }
  wyvern_device* device;
  check(count > 1 ? wyvern_device_open(arguments[1], &device) : wyvern_device_open_best(&device));
  wyvern_device_info info = WYVERN_DEVICE_INFO_INIT;
  check(wyvern_device_get_info(device, &info));
  printf("Wyvern %s on %s, %s\n", wyvern_version(), info.name, info.model);

  wyvern_runtime* runtime;
  check(wyvern_runtime_create(NULL, &runtime));
  wyvern_problem* problem = make_problem();
  wyvern_operator* op;
  check(wyvern_prepare(runtime, device, problem, NULL, &op));
  const char* plan;
  check(wyvern_operator_plan(op, &plan));
  printf("by %s\n", plan);

  static tensors made;
  allocate(op, device, &made);
  fill_inputs(&made);
  launch(op, device, &made);
  const int good =
      outputs_are_right(&made) & stage_is_asked(runtime, device, problem, find(&made, "k"));

  release(&made);
  wyvern_operator_destroy(op);
  wyvern_problem_destroy(problem);
  wyvern_runtime_destroy(runtime);
  wyvern_device_destroy(device);
  return good ? 0 : 1;
}
