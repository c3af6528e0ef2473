//! What the pool's benches share: a pool on a reactor, a load that keeps some operations in flight, medians, and verdicts.
//!
//! Every figure is a ratio of two measurements that were taken in turn, in one run: on a machine that also does other
//! things both get their share of the disturbance. Rounds are repeated and the median counts.
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "each bench uses a part of it")]

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rimrock::device::{Device, OpenOptions};
use rimrock::memory::DmaBuf;
use rimrock::pool::{Pool, PoolManager, PoolOptions, Volume, VolumeSpec};
use rimrock::reactor::sync::Event;
use rimrock::reactor::{self, ReactorConfig, ReactorHandle, Reactors};

pub const BLOCK: u64 = 4096;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// Words of the command line: `name=value` pairs, with defaults.
pub struct Options(Vec<String>);

impl Options {
    pub fn read() -> Options {
        Options(std::env::args().skip(1).filter(|word| word != "--bench").collect())
    }

    pub fn text(&self, name: &str, default: &str) -> String {
        let found = self
            .0
            .iter()
            .find_map(|word| word.split_once('=').filter(|(key, _)| *key == name))
            .map(|(_, v)| v);
        found.unwrap_or(default).to_owned()
    }

    pub fn number(&self, name: &str, default: u64) -> u64 {
        self.text(name, &default.to_string()).parse().unwrap_or_else(|_| panic!("{name} must be a number"))
    }
}

/// Waits for a future on this thread, which sleeps meanwhile.
pub fn wait<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// A pool on one device, and the reactors it runs on.
pub struct Bench {
    pub device: Device,
    pub pool: Arc<Pool>,
    pub handles: Vec<ReactorHandle>,
    manager: PoolManager,
    reactors: Reactors,
}

impl Bench {
    /// A new pool on the device `uri`; what that held is lost. One reactor on each of the first `cores` cores.
    pub fn new(uri: &str, cores: usize) -> Bench {
        Bench::on(Device::open(uri, OpenOptions::default()).expect("the device opens"), cores)
    }

    /// The same on a device that is open.
    pub fn on(device: Device, cores: usize) -> Bench {
        let options = PoolOptions { force: true, ..PoolOptions::default() };
        let (reactors, manager) = started(cores);
        let pool = wait(manager.create("bench", vec![device.clone()], options)).expect("the pool is made");
        Bench { device, pool, handles: reactors.handles().to_vec(), manager, reactors }
    }

    /// The pool that is on a device; and when its import began, with everything else in place.
    pub fn import(device: Device, cores: usize) -> (Bench, Instant) {
        let (reactors, manager) = started(cores);
        let begun = Instant::now();
        let pool = wait(manager.import(vec![device.clone()])).expect("the pool is opened");
        (Bench { device, pool, handles: reactors.handles().to_vec(), manager, reactors }, begun)
    }

    pub fn volume(&self, name: &str, size: u64) -> Volume {
        let spec = VolumeSpec { name: name.into(), size, block_size: 4096, write_cache: true, uuid: None };
        wait(self.pool.volume_create(spec)).expect("the volume is made");
        wait(self.pool.open(name)).expect("the volume opens")
    }

    /// A volume that is written from its first byte to its last.
    pub fn full_volume(&self, name: &str, size: u64) -> Volume {
        let volume = self.volume(name, size);
        self.run(&volume, Load::write(8).of(1 << 20), size / MIB, |n| n * MIB);
        self.flush(&volume);
        volume
    }

    pub fn snapshot(&self, volume: &str, name: &str) {
        wait(self.pool.snapshot_create(volume, name)).expect("a snapshot");
    }

    pub fn flush(&self, volume: &Volume) {
        let volume = volume.clone();
        wait(self.handles[0].call(move || async move { volume.flush().await }))
            .expect("the reactor lives")
            .expect("a flush");
    }

    /// Deletes, and waits until the space is back.
    pub fn delete(&self, names: &[String]) {
        for name in names {
            wait(self.pool.delete(name)).expect("it is deleted");
        }
        self.settle();
    }

    /// Waits until nothing is deleted in the background any more.
    pub fn settle(&self) {
        while wait(self.pool.info()).expect("the pool answers").deleting > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Runs `operations` operations on the first reactor.
    pub fn run(
        &self,
        volume: &Volume,
        load: Load,
        operations: u64,
        offset: impl Fn(u64) -> u64 + Send + 'static,
    ) -> Measured {
        let volume = volume.clone();
        let run = self.handles[0].call(move || async move {
            let until = Until { operations, stop: Arc::default() };
            keep_busy(volume, load, until, offset).await
        });
        wait(run).expect("the reactor lives")
    }

    /// Runs on the reactor `at`, in the background, until it is stopped.
    pub fn start(
        &self,
        at: usize,
        volume: &Volume,
        load: Load,
        offset: impl Fn(u64) -> u64 + Send + 'static,
    ) -> Running {
        let (volume, handle) = (volume.clone(), self.handles[at].clone());
        let stop = Arc::new(AtomicBool::new(false));
        let until = Until { operations: u64::MAX, stop: Arc::clone(&stop) };
        let thread = std::thread::spawn(move || {
            let run = handle.call(move || async move { keep_busy(volume, load, until, offset).await });
            wait(run).expect("the reactor lives")
        });
        Running { stop, thread }
    }

    pub fn close(self) {
        wait(self.manager.shut(&self.pool)).expect("the pool closes");
        self.reactors.shutdown();
    }

    /// Lets everything go as it is, as a kill of the process would.
    pub fn kill(self) {
        self.reactors.shutdown();
    }
}

fn started(cores: usize) -> (Reactors, PoolManager) {
    let config = ReactorConfig { cores: (0..cores).collect(), ..ReactorConfig::default() };
    let reactors = Reactors::start(config).expect("the reactors start");
    let manager = PoolManager::new(reactors.handles().to_vec(), 512 << 20);
    (reactors, manager)
}

/// What is kept in flight.
#[derive(Clone, Copy)]
pub struct Load {
    write: bool,
    depth: usize,
    bytes: usize,
}

impl Load {
    pub fn write(depth: usize) -> Load {
        Load { write: true, depth, bytes: BLOCK as usize }
    }

    pub fn read(depth: usize) -> Load {
        Load { write: false, ..Load::write(depth) }
    }

    pub fn of(self, bytes: usize) -> Load {
        Load { bytes, ..self }
    }
}

struct Until {
    operations: u64,
    stop: Arc<AtomicBool>,
}

/// A load in the background.
pub struct Running {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Measured>,
}

impl Running {
    pub fn stop(self) -> Measured {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the load ends")
    }
}

/// What a load found.
pub struct Measured {
    pub operations: u64,
    pub wall: Duration,
    /// Nanoseconds from one completion in a slot of the queue to the next: waiting for the reactor counts.
    pub latency: Histogram<u64>,
}

impl Measured {
    pub fn none() -> Measured {
        let latency = Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("constant bounds");
        Measured { operations: 0, wall: Duration::ZERO, latency }
    }

    /// Adds one that came after it.
    pub fn add(&mut self, other: &Measured) {
        self.operations += other.operations;
        self.wall += other.wall;
        self.latency.add(&other.latency).expect("the same bounds");
    }

    pub fn rate(&self) -> f64 {
        self.operations as f64 / self.wall.as_secs_f64()
    }

    /// Microseconds.
    pub fn at(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64 / 1e3
    }
}

/// Keeps `depth` operations in flight on this reactor; operation `n` begins at `offset(n)`.
async fn keep_busy(
    volume: Volume,
    load: Load,
    until: Until,
    offset: impl Fn(u64) -> u64 + 'static,
) -> Measured {
    let measured = Rc::new(RefCell::new(Measured::none()));
    let (offset, next, running) = (Rc::new(offset), Rc::new(Cell::new(0)), Rc::new(Cell::new(load.depth)));
    let (ended, until, begin) = (Rc::new(Event::new()), Rc::new(until), Instant::now());
    for _ in 0..load.depth {
        let (volume, measured, offset) = (volume.clone(), Rc::clone(&measured), Rc::clone(&offset));
        let (next, running, ended) = (Rc::clone(&next), Rc::clone(&running), Rc::clone(&ended));
        let until = Rc::clone(&until);
        reactor::spawn(async move {
            let mut last = Instant::now();
            while next.get() < until.operations && !until.stop.load(Ordering::Relaxed) {
                let number = next.get();
                next.set(number + 1);
                let at = offset(number);
                match load.write {
                    true => volume.write(at, DmaBuf::uninit(load.bytes).freeze(), false).await,
                    false => volume.read(at, DmaBuf::uninit(load.bytes)).await.0,
                }
                .expect("the I/O succeeds");
                // A device in memory never waits: the others get their turn here.
                reactor::yield_now().await;
                let now = Instant::now();
                let mut measured = measured.borrow_mut();
                measured.latency.saturating_record((now - last).as_nanos() as u64);
                measured.operations += 1;
                last = now;
            }
            running.set(running.get() - 1);
            ended.notify();
        });
    }
    while running.get() > 0 {
        ended.wait().await;
    }
    let mut measured = measured.replace(Measured::none());
    measured.wall = begin.elapsed();
    measured
}

/// A number that looks random and depends on `value` alone.
pub fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Random blocks of the first `size` bytes.
pub fn anywhere(seed: u64, size: u64) -> impl Fn(u64) -> u64 + Send + Copy + 'static {
    move |n| mix(mix(seed) ^ n) % (size / BLOCK) * BLOCK
}

/// One block in each MiB of `size` bytes, always the same one, each MiB once, in a scattered order.
pub fn one_per_mib(size: u64) -> impl Fn(u64) -> u64 + Send + Copy + 'static {
    let chunks = size / MIB;
    // Odd steps visit each chunk once where their number is a power of two; others are taken in order.
    let step = if chunks.is_power_of_two() { 0x9e37_79b1 } else { 1 };
    move |n| {
        let chunk = n.wrapping_mul(step) % chunks;
        chunk * MIB + mix(chunk) % (MIB / BLOCK) * BLOCK
    }
}

/// What a ratio or a time shall be.
#[derive(Clone, Copy)]
pub enum Aim {
    AtLeast(f64),
    AtMost(f64),
}

/// The figures of one thing over the rounds.
#[derive(Default)]
pub struct Figure(Vec<f64>);

impl Figure {
    pub fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    pub fn quantile(&self, quantile: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
            .get(((sorted.len() as f64 * quantile) as usize).min(sorted.len().max(1) - 1))
            .copied()
            .unwrap_or(0.0)
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// One line: the median, what it shall be, and between what it was.
    pub fn judge(&self, what: &str, aim: Aim) {
        self.verdict(what, "median", self.median(), aim);
    }

    /// The same with another quantile than the median.
    pub fn judge_at(&self, what: &str, quantile: f64, aim: Aim) {
        self.verdict(what, &format!("p{}", quantile * 100.0), self.quantile(quantile), aim);
    }

    fn verdict(&self, what: &str, name: &str, value: f64, aim: Aim) {
        let (met, sign, aim) = match aim {
            Aim::AtLeast(aim) => (value >= aim, "≥", aim),
            Aim::AtMost(aim) => (value <= aim, "≤", aim),
        };
        println!(
            "{:6} {what}: {name} {value:.3} (aim {sign} {aim}); {} rounds, {:.3} to {:.3}",
            if met { "met" } else { "MISSED" },
            self.0.len(),
            self.quantile(0.0),
            self.quantile(1.0),
        );
    }
}
