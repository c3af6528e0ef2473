//! The command line. Owns nothing: every command but `serve`, `quickstart` and `bench` is a call over the control
//! socket, and what it prints comes out of the answer.
//!
//! Exit codes: 0 done; 1 refused or failed; 2 the command line itself is wrong.
#![forbid(unsafe_code)]

mod bench;
mod check;
mod client;
mod clone;
mod daemon;
mod device;
mod diff;
mod events;
mod failure;
mod output;
mod pool;
mod quickstart;
mod rollback;
mod rpc;
mod serve;
mod snapshot;
mod transfer;
mod volume;

use clap::{Parser, Subcommand};
use failure::Failure;
use output::Format;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

/// A storage appliance for AI checkpoints and model serving: thin volumes in a snapshot tree, served over NVMe/TCP.
#[derive(Debug, Parser)]
#[command(name = "rimrock", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "First steps:
  rimrock quickstart                         see the whole thing work, on files under ./rimrock-data
  rimrock serve                              start the daemon; the other commands talk to it
  rimrock pool create main 'uring:/var/lib/rimrock/disk0.img?size=64GiB'
  rimrock volume create model 20GiB
  rimrock volume export model                prints the `nvme connect` line for the host
  rimrock snapshot create model@step-1000")]
pub struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// What every command takes.
#[derive(Debug, Clone, clap::Args)]
pub struct Common {
    /// The daemon's control socket [env: RIMROCK_SOCKET] [default: /run/rimrock/rimrock.sock]
    #[arg(short, long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// How answers are printed
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    output: Format,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon in the foreground
    Serve(serve::Serve),
    /// Show checkpoints, snapshots, a rollback and a clone at work, on files in this directory
    Quickstart(quickstart::Quickstart),
    /// Create, import and look after pools
    #[command(subcommand)]
    Pool(pool::Pool),
    /// Open and list devices
    #[command(subcommand)]
    Device(device::Device),
    /// Create, export and look after volumes
    #[command(subcommand)]
    Volume(volume::Volume),
    /// Take snapshots, compare them, go back to them, send them elsewhere
    #[command(subcommand)]
    Snapshot(snapshot::Snapshot),
    /// Make writable volumes out of snapshots
    #[command(subcommand)]
    Clone(clone::Clone),
    /// Show what has happened
    Events(events::Events),
    /// Measure a target
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Call one method of the control socket and print its result
    Rpc(rpc::Rpc),
}

impl Common {
    /// The socket that was named, on the command line or by the environment.
    fn named_socket(&self) -> Option<PathBuf> {
        let environment = || std::env::var_os("RIMROCK_SOCKET").filter(|path| !path.is_empty());
        self.socket.clone().or_else(|| environment().map(PathBuf::from))
    }
}

/// Runs the command line and gives the exit code.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let common = &cli.common;
    let done = match cli.command {
        Command::Serve(serve) => serve.run(common),
        Command::Quickstart(quickstart) => quickstart.run(common),
        Command::Pool(pool) => pool.run(common),
        Command::Device(device) => device.run(common),
        Command::Volume(volume) => volume.run(common),
        Command::Snapshot(snapshot) => snapshot.run(common),
        Command::Clone(clone) => clone.run(common),
        Command::Events(events) => events.run(common),
        Command::Bench(bench) => bench.run(common),
        Command::Rpc(rpc) => rpc.run(common),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(common.output),
    }
}

/// A size argument.
fn size(text: &str) -> Result<u64, String> {
    crate::units::parse_size(text).map_err(|error| error.to_string())
}

/// Where something listens or is to listen.
fn address(text: &str) -> Result<SocketAddr, String> {
    match text.parse::<SocketAddr>() {
        Ok(address) if address.port() > 0 => Ok(address),
        _ => Err("must be ADDR:PORT with a port from 1, such as 0.0.0.0:4420 or [::1]:4420".to_owned()),
    }
}
