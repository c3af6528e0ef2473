//! The configuration file: TOML in, typed values out.
//!
//! Every key has a default, so no file is needed. An unknown key is an error that names the nearest known one: a
//! misspelt key must never mean "use the default". `config/rimrock.toml` documents every key, and a test keeps it
//! complete.
#![forbid(unsafe_code)]

use crate::nearest::nearest;
use crate::units::{format_size, parse_size};
use serde::{Deserialize, Deserializer};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Where the control socket lies unless said otherwise.
pub const DEFAULT_SOCKET: &str = "/run/rimrock/rimrock.sock";

/// The least memory for data in flight; with many reactors the daemon asks for more.
const BUFFERS_MIN: u64 = 36 << 20;
/// The least memory for cached pages: the way from the root to the leaves of a few volumes.
const PAGE_CACHE_MIN: u64 = 1 << 20;
/// What may be logged, from everything to nothing.
const LEVELS: [&str; 6] = ["trace", "debug", "info", "warn", "error", "off"];

/// The whole file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The polling threads.
    pub reactor: ReactorSection,
    /// Memory budgets.
    pub memory: MemorySection,
    /// The control socket.
    pub control: ControlSection,
    /// The NVMe/TCP target.
    pub target: TargetSection,
    /// The discovery service.
    pub discovery: DiscoverySection,
    /// What is logged.
    pub log: LogSection,
    /// Devices opened at the start.
    pub device: Vec<DeviceEntry>,
    /// Pools imported, or created, at the start.
    pub pool: Vec<PoolEntry>,
    /// Subsystems over raw devices. (Those over volumes are kept in their pool.)
    pub subsystem: Vec<SubsystemEntry>,
}

/// `[reactor]`
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReactorSection {
    /// The cores to poll on; empty means all but one, at least one.
    #[serde(deserialize_with = "cores")]
    pub cores: Vec<usize>,
    /// What a reactor without work does.
    pub poll: Poll,
    /// How long a reactor without work keeps polling before it sleeps, in microseconds; `None` is its own default.
    pub spin_us: Option<u32>,
}

/// What a reactor without work does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Poll {
    /// Sleeps in steps; an idle appliance costs no CPU time.
    #[default]
    Adaptive,
    /// Never sleeps.
    Busy,
}

/// `[memory]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemorySection {
    /// The most memory for data in flight, in bytes.
    #[serde(deserialize_with = "size_from::<_, BUFFERS_MIN>")]
    pub buffers: u64,
    /// The most memory for the pools' page cache, in bytes, shared by all reactors.
    #[serde(deserialize_with = "size_from::<_, PAGE_CACHE_MIN>")]
    pub page_cache: u64,
    /// Use huge pages that the system has set aside.
    pub hugepages: bool,
}

/// `[control]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ControlSection {
    /// The path of the control socket.
    pub socket: PathBuf,
}

/// `[target]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TargetSection {
    /// Where an export listens unless told otherwise.
    #[serde(deserialize_with = "listen")]
    pub listen: SocketAddr,
}

/// `[discovery]`
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DiscoverySection {
    /// Announce it to the local network by multicast DNS.
    pub mdns: bool,
}

/// `[log]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogSection {
    /// `error`, `warn`, `info`, `debug`, `trace`, `off`, or by part, such as `info,rimrock::pool=debug`.
    #[serde(deserialize_with = "level")]
    pub level: String,
}

/// `[[device]]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceEntry {
    /// What pools and subsystems call it.
    pub name: String,
    /// What it is.
    pub uri: String,
}

/// `[[pool]]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolEntry {
    /// The pool's name; an imported pool must bear it.
    pub name: String,
    /// Names of devices, or URIs.
    pub devices: Vec<String>,
    /// Create the pool when the devices hold none.
    #[serde(default)]
    pub create: bool,
}

/// `[[subsystem]]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubsystemEntry {
    /// Its NQN.
    pub nqn: String,
    /// Its serial number.
    #[serde(default)]
    pub serial_number: Option<String>,
    /// Devices by name, namespaces 1, 2, 3 … in this order.
    pub devices: Vec<String>,
    /// Where it listens; empty means `target.listen`.
    #[serde(default)]
    pub listen: Vec<SocketAddr>,
    /// Host NQNs that may connect; empty means any.
    #[serde(default)]
    pub hosts: Vec<String>,
}

impl Default for MemorySection {
    fn default() -> MemorySection {
        MemorySection { buffers: 512 << 20, page_cache: 256 << 20, hugepages: false }
    }
}

impl Default for ControlSection {
    fn default() -> ControlSection {
        ControlSection { socket: DEFAULT_SOCKET.into() }
    }
}

impl Default for TargetSection {
    fn default() -> TargetSection {
        TargetSection { listen: SocketAddr::from(([0, 0, 0, 0], 4420)) }
    }
}

impl Default for LogSection {
    fn default() -> LogSection {
        LogSection { level: "info".to_owned() }
    }
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A key or value is wrong. The text has the line, and the nearest known key.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// Which file.
        path: PathBuf,
        /// Where and why.
        reason: String,
    },
}

/// Reads and checks a file.
pub fn load(path: &Path) -> Result<Config, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    parse(&text).map_err(|reason| ConfigError::Invalid { path: path.to_owned(), reason })
}

/// Checks the text of a file.
pub fn parse(text: &str) -> Result<Config, String> {
    let config: Config = toml::from_str(text).map_err(|error| explain(text, &error))?;
    let mut names: Vec<&str> = config.device.iter().map(|device| device.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("two [[device]] entries are named {:?}", twice[0]));
    }
    for subsystem in &config.subsystem {
        if let Some(missing) = subsystem.devices.iter().find(|device| !names.contains(&device.as_str())) {
            return Err(format!(
                "[[subsystem]] {} names the device {missing:?}, which no [[device]] has",
                subsystem.nqn
            ));
        }
    }
    if let Some(nowhere) =
        config.subsystem.iter().find(|subsystem| subsystem.listen.iter().any(|address| address.port() == 0))
    {
        return Err(format!("[[subsystem]] {}: {NO_PORT}", nowhere.nqn));
    }
    if let Some(empty) = config.pool.iter().find(|pool| pool.devices.is_empty()) {
        return Err(format!("[[pool]] {:?} has no devices", empty.name));
    }
    Ok(config)
}

/// The parser's message with its line, and for an unknown key the nearest known one.
fn explain(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
    let place = line.map_or(String::new(), |line| format!("line {line}: "));
    let message = error.message();
    let mut quoted = message.split('`').skip(1).step_by(2);
    let advice = match (message.starts_with("unknown "), quoted.next()) {
        (true, Some(unknown)) => nearest(unknown, quoted),
        _ => None,
    };
    match advice {
        Some(known) => format!("{place}{message}; did you mean `{known}`?"),
        None => format!("{place}{message}"),
    }
}

/// A size of at least `MIN` bytes.
fn size_from<'de, D: Deserializer<'de>, const MIN: u64>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    match parse_size(&text).map_err(serde::de::Error::custom)? {
        bytes if bytes >= MIN => Ok(bytes),
        _ => Err(serde::de::Error::custom(format!("{text:?} is too little; at least {}", format_size(MIN)))),
    }
}

const NO_PORT: &str = "port 0 is no address to listen at; give one from 1, as in \"0.0.0.0:4420\"";

fn listen<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    match SocketAddr::deserialize(deserializer)? {
        address if address.port() > 0 => Ok(address),
        _ => Err(serde::de::Error::custom(NO_PORT)),
    }
}

/// Levels, for all or for a part: a word that is no level would be taken for a part of which everything is logged,
/// and of the rest nothing.
fn level<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    let directives: Vec<&str> = text.split(',').map(str::trim).collect();
    for directive in &directives {
        let level = directive.rsplit_once('=').map_or(*directive, |(_part, level)| level);
        if !LEVELS.contains(&level) {
            let meant = nearest(level, LEVELS).map(|meant| format!("; did you mean {meant:?}?"));
            return Err(serde::de::Error::custom(format!(
                "{level:?} is not a level: {}{}",
                LEVELS.join(", "),
                meant.unwrap_or_default()
            )));
        }
    }
    Ok(directives.join(","))
}

fn cores<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Cores {
        List(Vec<usize>),
        Text(String),
    }
    match Cores::deserialize(deserializer)? {
        Cores::List(list) => Ok(list),
        Cores::Text(text) => parse_cores(&text).map_err(serde::de::Error::custom),
    }
}

/// A list of cores as Linux writes them: `0`, `1-3`, `0,2-3`.
pub fn parse_cores(text: &str) -> Result<Vec<usize>, String> {
    /// More cores than any machine has, so that `0-4000000000` is an error and not a list.
    const CORES_MAX: usize = 4096;
    let number = |digits: &str| match digits.trim().parse::<usize>() {
        Ok(core) if core < CORES_MAX => Ok(core),
        _ => Err(format!("{text:?} is not a list of cores such as 0, 1-3 or 0,2-3")),
    };
    let mut cores = Vec::new();
    for part in text.split(',') {
        match part.split_once('-') {
            Some((first, last)) => {
                let (first, last) = (number(first)?, number(last)?);
                if first > last {
                    return Err(format!("the range {} runs backwards", part.trim()));
                }
                cores.extend(first..=last);
            }
            None => cores.push(number(part)?),
        }
    }
    let mut sorted = cores.clone();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(twice) => Err(format!("core {} is named twice", twice[0])),
        None => Ok(cores),
    }
}

#[cfg(test)]
#[path = "config/tests.rs"]
mod tests;
