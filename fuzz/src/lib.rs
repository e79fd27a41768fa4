//! What every fuzz target does with its bytes: decode them, use the decoded value as the product does, encode
//! it again where it has an encoding, and check how much memory that took.
//!
//! The targets under `fuzz_targets/` call [`run`] with what libFuzzer makes up;
//! `testbed/tests/corpus/main.rs` takes this file in too, and calls it with the inputs that are kept under
//! `corpus/`. Bytes are never expected to be right: an error is as good as a value, as long as it has a
//! message. A finding is a panic, more memory than the input warrants, or a run that does not end.

mod hub;
mod input;
mod messages;
mod models;
mod plans;
mod profiles;
mod serve;
mod small;
mod texts;

use input::Input;
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// A decoder, and the memory that it may take.
pub struct Target {
    /// The name of its folder in `corpus/` and of its file in `fuzz_targets/`.
    pub name: &'static str,
    decode: fn(&[u8]),
    /// The bytes of memory that it may take for any input.
    fixed: usize,
    /// The further bytes of memory that it may take for each byte of the input.
    each: usize,
}

const KIB: usize = 1 << 10;

/// All fuzz targets, by name.
pub const TARGETS: &[Target] = &[
    Target { name: "frame", decode: small::frame, fixed: KIB, each: 0 },
    Target { name: "handshake", decode: small::handshake, fixed: KIB, each: 0 },
    Target { name: "certificate", decode: small::certificate, fixed: 4 * KIB, each: 4 },
    Target { name: "join", decode: small::join, fixed: 16 * KIB, each: 64 },
    Target { name: "fault", decode: small::fault, fixed: 4 * KIB, each: 32 },
    Target { name: "shape", decode: small::shape, fixed: 4 * KIB, each: 64 },
    Target { name: "cluster", decode: small::cluster, fixed: 64 * KIB, each: 1200 },
    Target { name: "header", decode: models::header, fixed: 4 * KIB, each: 64 },
    Target { name: "config", decode: models::config, fixed: 16384 * KIB, each: 64 },
    Target { name: "checkpoint", decode: models::checkpoint, fixed: 32768 * KIB, each: 64 },
    Target { name: "sentence", decode: models::sentence, fixed: 64 * KIB, each: 64 },
    Target { name: "tokenizer", decode: models::tokenizer, fixed: 16384 * KIB, each: 4 * KIB },
    Target { name: "gguf", decode: models::gguf, fixed: 32768 * KIB, each: 256 },
    Target { name: "onnx", decode: models::onnx, fixed: 131072 * KIB, each: KIB },
    Target { name: "manifest", decode: models::manifest, fixed: 16384 * KIB, each: 256 },
    Target { name: "image", decode: models::image, fixed: 1024 * 1024 * KIB, each: 64 },
    Target { name: "plan", decode: plans::plan, fixed: 16384 * KIB, each: 64 },
    Target { name: "lower", decode: plans::lower, fixed: 65536 * KIB, each: 0 },
    Target { name: "profile", decode: profiles::profile, fixed: 65536 * KIB, each: 64 },
    Target { name: "worker", decode: messages::worker, fixed: 64 * KIB, each: 128 },
    Target { name: "coordinator", decode: messages::coordinator, fixed: 1024 * KIB, each: 128 },
    Target { name: "client", decode: messages::client, fixed: 64 * KIB, each: 128 },
    Target { name: "text", decode: texts::text, fixed: 64 * KIB, each: 256 },
    Target { name: "serve", decode: serve::serve, fixed: 1024 * KIB, each: 512 },
    Target { name: "hub", decode: hub::hub, fixed: 64 * KIB, each: 256 },
];

/// Runs the target `name` on an input.
///
/// # Panics
/// When the input is a finding, or there is no such target.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target of this name");
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    (target.decode)(bytes);
    let most = MEMORY.peak_usage().saturating_sub(before);
    let allowed = target.fixed + target.each * bytes.len();
    assert!(most <= allowed, "{} bytes of input took {most} bytes of memory", bytes.len());
}

/// Checks that an error has a message.
fn said(error: &dyn std::fmt::Display) {
    assert!(!error.to_string().is_empty(), "an error without words");
}

/// The decoded value; `None` if there was an error, whose message is checked.
fn good<T, E: std::fmt::Display>(outcome: Result<T, E>) -> Option<T> {
    outcome.map_err(|error| said(&error)).ok()
}
