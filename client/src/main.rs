//! The `galaxy` command: everything that a person asks of a cluster.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
