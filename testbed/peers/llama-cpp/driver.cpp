// Makes text with llama.cpp over its RPC servers, and tells when each token was there.
//
//     driver MODEL.gguf CONTEXT HOST:PORT[,HOST:PORT...]
//
// Every layer is offloaded, split over the servers as llama.cpp does by itself. Says "ready" once
// the weights are placed. Each line on standard input is one text: how many tokens to make, then
// the ids of its prompt. The answer is a line of JSON: {"tokens": [ids], "at_ns": [since the prompt
// was given]}. Tokens are the most likely ones; what ends texts is not looked for.
#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string & why) {
    std::fprintf(stderr, "error: %s\n", why.c_str());
    std::exit(1);
}

// What the servers offer, in their order.
std::vector<ggml_backend_dev_t> devices(const std::string & servers) {
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    if (!rpc) fail("llama.cpp is built without RPC");
    using Add = ggml_backend_reg_t (*)(const char *);
    auto add = reinterpret_cast<Add>(ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server"));
    if (!add) fail("this llama.cpp adds RPC servers in another way");
    std::vector<ggml_backend_dev_t> found;
    std::istringstream list(servers);
    for (std::string server; std::getline(list, server, ',');) {
        ggml_backend_reg_t reg = add(server.c_str());
        if (!reg) fail(server + " does not answer");
        ggml_backend_register(reg);
        for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); i++) {
            found.push_back(ggml_backend_reg_dev_get(reg, i));
        }
    }
    found.push_back(nullptr);
    return found;
}

void quiet(ggml_log_level level, const char * text, void *) {
    if (level >= GGML_LOG_LEVEL_WARN) std::fputs(text, stderr);
}

} // namespace

int main(int argc, char ** argv) {
    if (argc != 4) fail("usage: driver MODEL.gguf CONTEXT HOST:PORT[,HOST:PORT...]");
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    auto offload = devices(argv[3]);

    llama_model_params how = llama_model_default_params();
    how.devices = offload.data();
    how.n_gpu_layers = 999;
    llama_model * model = llama_model_load_from_file(argv[1], how);
    if (!model) fail(std::string(argv[1]) + " cannot be loaded");
    llama_context_params room = llama_context_default_params();
    room.n_ctx = std::atoi(argv[2]);
    room.n_threads = room.n_threads_batch = 1;
    room.no_perf = true;
    llama_context * context = llama_init_from_model(model, room);
    if (!context) fail("there is no room for a context");
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

    std::cout << "ready" << std::endl;
    using Clock = std::chrono::steady_clock;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        size_t count = 0;
        words >> count;
        std::vector<llama_token> next;
        for (llama_token id; words >> id;) next.push_back(id);
        if (count == 0 || next.empty()) fail("a line is: COUNT ID [ID...]");
        llama_memory_clear(llama_get_memory(context), true);
        std::vector<llama_token> tokens;
        std::vector<long long> at;
        const auto begun = Clock::now();
        while (tokens.size() < count) {
            if (llama_decode(context, llama_batch_get_one(next.data(), int32_t(next.size())))) {
                fail("llama_decode failed");
            }
            const float * logits = llama_get_logits_ith(context, -1);
            next.assign(1, llama_token(std::max_element(logits, logits + vocabulary) - logits));
            tokens.push_back(next[0]);
            at.push_back(std::chrono::nanoseconds(Clock::now() - begun).count());
        }
        std::cout << "{\"tokens\": [";
        for (size_t i = 0; i < count; i++) std::cout << (i ? ", " : "") << tokens[i];
        std::cout << "], \"at_ns\": [";
        for (size_t i = 0; i < count; i++) std::cout << (i ? ", " : "") << at[i];
        std::cout << "]}" << std::endl;
    }
    llama_free(context);
    llama_model_free(model);
}
