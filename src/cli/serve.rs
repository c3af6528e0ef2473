//! `rimrock serve`: the daemon.
#![forbid(unsafe_code)]

use super::daemon::{self, start_log, stop_signal};
use super::{Common, Failure};
use crate::config::{self, Config};
use std::path::PathBuf;

/// Run the daemon in the foreground
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Without a configuration file the daemon starts with nothing configured, and everything is
done with the other commands. Started again, it has no pool until `rimrock pool import` brings it
back with everything exported from it; a [[pool]] entry in the configuration does so at every start.
SIGTERM and Ctrl-C end it cleanly.

Examples:
  rimrock serve
  rimrock serve --config /etc/rimrock/rimrock.toml
  rimrock serve --socket /tmp/rimrock.sock --cores 0,2-3"
)]
pub struct Serve {
    /// Configuration file (config/rimrock.toml documents every key)
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Cores to poll on, such as 1 or 0,2-3 (default: all but one, at least one)
    #[arg(long, value_name = "LIST", value_parser = CoreList::parse)]
    cores: Option<CoreList>,
}

#[derive(Debug, Clone)]
struct CoreList(Vec<usize>);

impl CoreList {
    fn parse(text: &str) -> Result<CoreList, String> {
        config::parse_cores(text).map(CoreList)
    }
}

impl Serve {
    /// Runs until a signal ends it.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let mut config = match &self.config {
            Some(path) => config::load(path).map_err(|error| {
                Failure::failed(error.to_string())
                    .hint("config/rimrock.toml in the source documents every key")
            })?,
            None => Config::default(),
        };
        if let Some(socket) = common.named_socket() {
            config.control.socket = socket;
        }
        if let Some(cores) = self.cores {
            config.reactor.cores = cores.0;
        }
        start_log(&config.log.level)?;
        let elsewhere = "the path is that of --socket, else RIMROCK_SOCKET, else `socket` of [control]";
        let until_told = async {
            stop_signal().await;
            Ok(())
        };
        daemon::run(&config, elsewhere, until_told)
    }
}
