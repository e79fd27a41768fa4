//! The network namespaces of testbeds: their names, and how a thread enters one.

use anyhow::{Context, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::{
    fs::File,
    os::fd::AsFd,
    path::{Path, PathBuf},
    thread,
};

/// Where `ip netns` keeps the names of namespaces.
pub(crate) const NAMES: &str = "/run/netns";

/// The name of a place's namespace; the bridge's place is `hub`.
pub fn namespace(testbed: &str, place: &str) -> String {
    format!("galaxy-{testbed}-{place}")
}

/// The file that stands for a network namespace.
pub(crate) fn network_file(name: &str) -> PathBuf {
    Path::new(NAMES).join(name)
}

/// Moves this thread, and those that it starts from now on, into a network namespace.
///
/// # Errors
/// When there is none of that name, or without root.
pub fn enter(network: &str) -> Result<()> {
    let path = network_file(network);
    let file = File::open(&path).with_context(|| {
        format!("there is no network namespace {network}: `galaxy-testbed up` makes it")
    })?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("cannot enter the network namespace {network}: it needs root"))
}

/// Calls `call` on a thread of its own that has entered `namespace`, and waits for it.
///
/// # Errors
/// As [`enter`].
///
/// # Panics
/// When `call` does.
pub fn inside<T: Send>(namespace: &str, call: impl FnOnce() -> T + Send) -> Result<T> {
    let entered = || enter(namespace).map(|()| call());
    match thread::scope(|scope| scope.spawn(entered).join()) {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
