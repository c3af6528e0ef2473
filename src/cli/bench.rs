//! `rimrock bench`: measures a target with our own initiator.
//!
//! Without `--connect` the target is Rimrock itself, in this process: a daemon as under `rimrock serve`, set up over
//! its control socket, on cores of its own.
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::daemon::{self, start_log};
use super::output::{Format, print, print_json};
use super::{Common, Failure, address, size};
use crate::config::{Config, parse_cores};
use crate::host::bench::{self, BenchReport, BenchSpec, OperationReport, Workload};
use clap::Subcommand;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;
use uuid::Uuid;

/// Measure a target
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Measure an NVMe/TCP target: one in this process, or a running one
    Target(Target),
}

/// Measure an NVMe/TCP target: one in this process, or a running one
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Without --workload a set is measured: 4 KiB random reads and writes at depth 1, 32 and 128, then
128 KiB and 1 MiB reads and writes.

Writes destroy what is there, so they are measured only on memory and on a file made for this. On
a running target, an existing file or a drive the set is of reads, and writes need --overwrite.

Examples:
  rimrock bench target
  rimrock bench target --workload randread --depth 128 --seconds 10
  rimrock bench target --backend 'uring:/data/bench.img?size=8GiB' --volume
  rimrock bench target --connect 127.0.0.1:4420 \\
      --nqn nqn.2026-01.io.rimrock:main:model
  rimrock bench target --backend uring:/dev/nvme1n1 --overwrite"
)]
pub struct Target {
    /// A running target; without, one is started in this process
    #[arg(long, value_name = "ADDR:PORT", requires = "nqn", value_parser = address)]
    connect: Option<SocketAddr>,
    /// The subsystem of the running target
    #[arg(long, requires = "connect")]
    nqn: Option<String>,
    /// The namespace
    #[arg(long, default_value_t = 1)]
    nsid: u32,
    /// What the target in this process shows
    #[arg(long, value_name = "URI", default_value = "ram:1GiB?populate=yes", conflicts_with = "connect")]
    backend: String,
    /// Show a volume of a new pool on the backend, instead of the backend itself
    #[arg(long, conflicts_with = "connect")]
    volume: bool,
    /// Measure writes too where something may be lost: on a running target, an existing file, a drive
    #[arg(long)]
    overwrite: bool,
    /// Cores of the target in this process
    #[arg(long, value_name = "LIST", default_value = "0", conflicts_with = "connect")]
    target_cores: String,
    /// Core of the initiator (default: not bound)
    #[arg(long)]
    core: Option<usize>,
    /// read, write, randread, randwrite, rw:PERCENT or randrw:PERCENT (of reads)
    #[arg(long)]
    workload: Option<Workload>,
    /// Bytes of one operation
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4KiB")]
    block: u64,
    /// Operations in flight on each queue
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1023))]
    depth: u16,
    /// I/O queues, each a connection of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: u16,
    /// Seconds that are measured, of each workload
    #[arg(long, default_value_t = 3.0, value_parser = seconds)]
    seconds: f64,
    /// Seconds before, which do not count
    #[arg(long, default_value_t = 0.5, value_parser = seconds)]
    warmup: f64,
    /// Use only the beginning of the namespace
    #[arg(long, value_name = "SIZE", value_parser = size)]
    range: Option<u64>,
    /// Compare every byte that is read
    #[arg(long)]
    verify: bool,
    /// Of offsets and patterns
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// One measurement to make.
type Job = (Workload, u64, u16);

/// The set that is measured when no workload is named.
const SET: [Job; 10] = [
    (Workload::RAND_READ, 4 << 10, 1),
    (Workload::RAND_READ, 4 << 10, 32),
    (Workload::RAND_READ, 4 << 10, 128),
    (Workload::RAND_WRITE, 4 << 10, 1),
    (Workload::RAND_WRITE, 4 << 10, 32),
    (Workload::RAND_WRITE, 4 << 10, 128),
    (Workload::READ, 128 << 10, 32),
    (Workload::WRITE, 128 << 10, 32),
    (Workload::READ, 1 << 20, 8),
    (Workload::WRITE, 1 << 20, 8),
];

/// A finished measurement.
struct Row {
    job: Job,
    report: BenchReport,
}

impl Bench {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let Bench::Target(target) = self;
        let jobs = target.jobs()?;
        let kept = target.loss().filter(|_| target.workload.is_none());
        let rows = match (target.connect, target.nqn.clone()) {
            (Some(address), Some(nqn)) => target.measure(jobs, address, &nqn)?,
            _ => target.with_own_target(jobs)?,
        };
        if common.output == Format::Json {
            print_json(&rows.iter().map(Row::to_json).collect())?;
        } else {
            print(&format!("{}\n", table(&rows)))?;
            if let Some(kept) = kept {
                print(&format!("Reads only, so that {kept} is kept; --overwrite measures writes too.\n"))?;
            }
        }
        match rows.iter().find(|row| row.report.mismatches > 0) {
            None => Ok(()),
            Some(row) => Err(Failure::failed(format!(
                "{} blocks held something else than what was written; the first is {:?}",
                row.report.mismatches, row.report.first_mismatch
            ))),
        }
    }
}

impl Target {
    /// What is to be measured. Nothing in it writes where something may be lost, unless that is allowed.
    fn jobs(&self) -> Result<Vec<Job>, Failure> {
        let wanted = match self.workload {
            Some(workload) => vec![(workload, self.block, self.depth)],
            None => SET.to_vec(),
        };
        let Some(loss) = self.loss() else { return Ok(wanted) };
        if self.volume {
            return Err(Failure::usage(format!("--volume makes a new pool, which destroys {loss}"))
                .hint("--overwrite allows it; a backend that does not exist yet needs no leave"));
        }
        let reads = |job: &Job| job.0.read_percent == 100;
        match self.workload {
            Some(workload) if workload.read_percent < 100 => {
                Err(Failure::usage(format!("{workload} destroys {loss}")).hint("--overwrite allows it"))
            }
            _ => Ok(wanted.into_iter().filter(reads).collect()),
        }
    }

    /// What writes would destroy; nothing where it may go, or was made for this.
    fn loss(&self) -> Option<String> {
        let path = self.backend.strip_prefix("uring:").map(|rest| rest.split('?').next().unwrap_or(rest));
        match (self.connect, path) {
            _ if self.overwrite => None,
            (Some(address), _) => Some(format!("what the target at {address} holds")),
            (None, Some(path)) if Path::new(path).exists() => Some(format!("what {path} holds")),
            _ => None,
        }
    }

    fn measure(&self, jobs: Vec<Job>, address: SocketAddr, nqn: &str) -> Result<Vec<Row>, Failure> {
        let mut rows = Vec::new();
        for job @ (workload, block, depth) in jobs {
            let mut spec = BenchSpec::new(address, nqn);
            spec.nsid = self.nsid;
            spec.workload = workload;
            spec.block_bytes = usize::try_from(block).unwrap_or(usize::MAX);
            spec.queue_depth = depth;
            spec.queues = self.queues;
            spec.duration = Duration::from_secs_f64(self.seconds);
            spec.warmup = Duration::from_secs_f64(self.warmup);
            spec.core = self.core;
            spec.range_bytes = self.range;
            spec.verify = self.verify;
            spec.seed = self.seed;
            let report = bench::run(spec).map_err(|error| {
                Failure::failed(format!("{workload}, {block} bytes, depth {depth}: {error}"))
            })?;
            rows.push(Row { job, report });
        }
        Ok(rows)
    }

    fn with_own_target(self, jobs: Vec<Job>) -> Result<Vec<Row>, Failure> {
        start_log("error")?;
        let directory = std::env::temp_dir().join(format!("rimrock-bench-{}", std::process::id()));
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .map_err(|error| Failure::failed(format!("cannot find a free port: {error}")))?;
        let mut config = Config::default();
        config.control.socket = directory.join("rimrock.sock");
        config.target.listen = port;
        config.reactor.cores = parse_cores(&self.target_cores).map_err(Failure::usage)?;
        let path = config.control.socket.clone();
        let measuring = daemon::blocking(move || {
            let nqn = self.set_up(path, port)?;
            self.measure(jobs, port, &nqn)
        });
        let rows = daemon::run(&config, "TMPDIR chooses another place for it", measuring);
        let _ = std::fs::remove_dir(&directory);
        rows
    }

    /// Exports the backend, or a volume on it. Gives the NQN.
    fn set_up(&self, socket: PathBuf, listen: SocketAddr) -> Result<String, Failure> {
        let common = Common { socket: Some(socket), output: Format::Json };
        if self.volume {
            let devices = vec![self.backend.clone()];
            let pool = call(
                &common,
                "pool_create",
                Arguments::new().with("name", "bench").with("devices", devices),
            )?;
            // A tenth stays free: writes are redirected, and what they replace comes back a moment later.
            let size = pool["free"].as_u64().unwrap_or(0) / 10 * 9;
            call(&common, "volume_create", Arguments::new().with("name", "bench").with("size", size))?;
            let exported = call(&common, "volume_export", Arguments::new().with("name", "bench"))?;
            return Ok(exported["nqn"].as_str().unwrap_or_default().to_owned());
        }
        let nqn = format!("nqn.2014-08.org.nvmexpress:uuid:{}", Uuid::new_v4());
        let device = Arguments::new().with("name", "bench").with("uri", self.backend.as_str());
        call(&common, "device_create", device)?;
        let subsystem = Arguments::new().with("nqn", nqn.as_str()).with("allow_any_host", true);
        call(&common, "nvmf_create_subsystem", subsystem)?;
        let namespace = json!({ "bdev_name": "bench", "nsid": self.nsid });
        call(
            &common,
            "nvmf_subsystem_add_ns",
            Arguments::new().with("nqn", nqn.as_str()).with("namespace", namespace),
        )?;
        let address = json!({ "trtype": "TCP", "traddr": listen.ip().to_string(), "trsvcid": listen.port().to_string() });
        let listener = Arguments::new().with("nqn", nqn.as_str()).with("listen_address", address);
        call(&common, "nvmf_subsystem_add_listener", listener)?;
        Ok(nqn)
    }
}

impl Row {
    fn to_json(&self) -> serde_json::Value {
        let (workload, block, depth) = self.job;
        json!({
            "workload": workload.to_string(),
            "block_bytes": block,
            "queue_depth": depth,
            "report": self.report,
        })
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table
        .set_header(["WORKLOAD", "BLOCK", "DEPTH", "IOPS", "MiB/s", "MEAN µs", "P50", "P99", "P99.9", "MAX"]);
    for row in rows {
        let (workload, block, depth) = row.job;
        let OperationReport { iops, mib_per_s, latency, .. } = row.report.total;
        let mut cells = vec![workload.to_string(), crate::units::format_size(block), depth.to_string()];
        cells.extend([format!("{iops:.0}"), format!("{mib_per_s:.0}")]);
        let times = [latency.mean_us, latency.p50_us, latency.p99_us, latency.p99_9_us, latency.max_us];
        cells.extend(times.iter().map(|time| format!("{time:.1}")));
        table.add_row(cells);
    }
    for at in 1..=9 {
        if let Some(column) = table.column_mut(at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number of seconds from 0 to 86400".to_owned()),
    }
}
