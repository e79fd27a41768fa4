#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| galaxy_fuzz::run("onnx", bytes));
