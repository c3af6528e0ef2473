//! The reactor threads: starting them, their loop, stopping them.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use nix::errno::Errno;

use super::executor::Executor;
use super::handle::{Counters, Message, ReactorHandle, ReactorId, Shared};
use super::{affinity, ring};
use crate::memory;

/// What a reactor does when it has nothing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PollMode {
    /// Spins for a moment, then sleeps.
    #[default]
    Adaptive,
    /// Never sleeps: its core is always fully used.
    Busy,
}

/// How reactors are set up.
#[derive(Debug, Clone)]
pub struct ReactorConfig {
    /// One reactor per core listed. Empty: every core this process may use but the first.
    pub cores: Vec<usize>,
    pub poll: PollMode,
    /// How long a reactor goes on polling after its last work before it sleeps, in microseconds.
    pub spin_us: u32,
}

impl Default for ReactorConfig {
    fn default() -> ReactorConfig {
        ReactorConfig { cores: Vec::new(), poll: PollMode::default(), spin_us: 50 }
    }
}

/// Why the reactors did not start.
#[derive(Debug, thiserror::Error)]
pub enum ReactorError {
    #[error("cannot read which cores this process may use: {source}")]
    Cores { source: Errno },
    #[error("core {core} is configured for two reactors; list each core once")]
    Twice { core: usize },
    #[error(
        "cannot bind reactor {reactor} to core {core}: {source}; this process may use cores {allowed:?} \
         (see the machine's core count, cgroup cpusets and taskset)"
    )]
    Bind { reactor: ReactorId, core: usize, allowed: Vec<usize>, source: Errno },
    #[error("cannot start the thread of reactor {reactor}: {source}")]
    Thread { reactor: ReactorId, source: std::io::Error },
    #[error(
        "cannot set up io_uring for reactor {reactor}: {source}; Linux 5.19 or newer is needed, and neither \
         /proc/sys/kernel/io_uring_disabled nor a seccomp filter may forbid it"
    )]
    Ring { reactor: ReactorId, source: std::io::Error },
}

/// The running reactors. Dropping it stops them.
pub struct Reactors {
    handles: Vec<ReactorHandle>,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

impl Reactors {
    /// Starts one reactor per configured core; returns when all of them run.
    pub fn start(config: ReactorConfig) -> Result<Reactors, ReactorError> {
        let cores = match config.cores.is_empty() {
            true => affinity::default_cores().map_err(|source| ReactorError::Cores { source })?,
            false => config.cores.clone(),
        };
        for (index, core) in cores.iter().enumerate() {
            if cores[..index].contains(core) {
                return Err(ReactorError::Twice { core: *core });
            }
        }
        let mut reactors =
            Reactors { handles: Vec::new(), threads: Vec::new(), stop: Arc::new(AtomicBool::new(false)) };
        for (index, core) in cores.iter().enumerate() {
            // An error drops `reactors`, which stops those that were started.
            reactors.start_one(ReactorId(index as u16), *core, &config)?;
        }
        Ok(reactors)
    }

    fn start_one(&mut self, id: ReactorId, core: usize, config: &ReactorConfig) -> Result<(), ReactorError> {
        let (ready, started) = bounded(1);
        let stop = Arc::clone(&self.stop);
        let settings = Settings { poll: config.poll, spin: Duration::from_micros(config.spin_us.into()) };
        let thread = std::thread::Builder::new()
            .name(format!("reactor-{id}"))
            .spawn(move || run(id, core, settings, &stop, &ready))
            .map_err(|source| ReactorError::Thread { reactor: id, source })?;
        self.threads.push(thread);
        let gone = || std::io::Error::other("the thread ended while starting");
        let handle = started.recv().map_err(|_| ReactorError::Thread { reactor: id, source: gone() })??;
        self.handles.push(handle);
        Ok(())
    }

    /// The reactors, by id.
    pub fn handles(&self) -> &[ReactorHandle] {
        &self.handles
    }

    /// Drops every task, waits for operations in flight and ends the threads. Must not be called on a
    /// reactor thread.
    pub fn shutdown(self) {
        drop(self);
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for handle in &self.handles {
            handle.shared.remote.signal();
        }
        for thread in self.threads.drain(..) {
            // A reactor that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Settings {
    poll: PollMode,
    spin: Duration,
}

/// What the reactor's own thread knows about itself.
pub(super) struct Reactor {
    pub(super) handle: ReactorHandle,
    settings: Settings,
}

impl Reactor {
    /// One that shares its thread with others, see [`super::SimReactors`].
    pub(super) fn simulated(handle: ReactorHandle) -> Reactor {
        Reactor { handle, settings: Settings { poll: PollMode::Adaptive, spin: Duration::ZERO } }
    }
}

thread_local! {
    static REACTOR: RefCell<Option<Rc<Reactor>>> = const { RefCell::new(None) };
}

/// The reactor whose thread this is, if it is one's.
pub fn current() -> Option<ReactorHandle> {
    super::handle::current()
}

pub(super) fn with_reactor<T>(f: impl FnOnce(&Reactor) -> T) -> Option<T> {
    REACTOR.try_with(|reactor| reactor.borrow().as_ref().map(|reactor| f(reactor))).ok().flatten()
}

/// Says which reactor this thread is, or that it is none any more.
pub(super) fn set_reactor(reactor: Option<Rc<Reactor>>) {
    REACTOR.with(|slot| *slot.borrow_mut() = reactor);
}

/// How long a task that polls something hot may go on without finding work before it must park:
/// `Duration::MAX` when the reactor polls busily, zero outside of a reactor.
pub fn spin() -> Duration {
    with_reactor(|reactor| match reactor.settings.poll {
        PollMode::Busy => Duration::MAX,
        PollMode::Adaptive => reactor.settings.spin,
    })
    .unwrap_or(Duration::ZERO)
}

/// The body of a reactor thread.
fn run(
    id: ReactorId,
    core: usize,
    settings: Settings,
    stop: &AtomicBool,
    ready: &Sender<Result<ReactorHandle, ReactorError>>,
) {
    let (executor, driver) = match set_up(id, core) {
        Ok(parts) => parts,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let (inbox, messages) = unbounded();
    let shared =
        Shared { id, core, remote: Arc::clone(executor.remote()), inbox, counters: Counters::default() };
    let handle = ReactorHandle { shared: Arc::new(shared) };
    let reactor = Rc::new(Reactor { handle: handle.clone(), settings });
    set_reactor(Some(Rc::clone(&reactor)));
    if ready.send(Ok(handle)).is_err() {
        return;
    }
    Loop { executor, driver, messages, reactor, loops: 0, busy: 0 }.run(stop);
    set_reactor(None);
}

fn set_up(id: ReactorId, core: usize) -> Result<(Executor, ring::Driver), ReactorError> {
    affinity::bind(core).map_err(|source| ReactorError::Bind {
        reactor: id,
        core,
        allowed: affinity::allowed_cores().unwrap_or_default(),
        source,
    })?;
    let (driver, kick) = ring::Driver::new().map_err(|source| ReactorError::Ring { reactor: id, source })?;
    Ok((Executor::with_kick(kick), driver))
}

struct Loop {
    executor: Executor,
    driver: ring::Driver,
    messages: Receiver<Message>,
    reactor: Rc<Reactor>,
    loops: u64,
    busy: u64,
}

impl Loop {
    fn run(mut self, stop: &AtomicBool) {
        let entered = self.executor.enter();
        let mut last_work = Instant::now();
        loop {
            let now = Instant::now();
            self.executor.set_now(now);
            let mut signalled = false;
            let pass = self.executor.pass_with(|| {
                signalled = true;
                self.messages.try_iter().for_each(|message| message());
            });
            let completed = self.driver.turn();
            self.loops += 1;
            if pass.worked > 0 || completed {
                self.busy += 1;
                last_work = now;
            }
            if signalled && stop.load(Ordering::SeqCst) {
                break;
            }
            self.publish();
            if self.may_sleep(now, last_work) {
                self.sleep(now);
            }
        }
        drop(entered);
        self.executor.clear();
    }

    fn may_sleep(&self, now: Instant, last_work: Instant) -> bool {
        !self.executor.has_ready()
            && !self.executor.has_idle()
            && self.reactor.settings.poll == PollMode::Adaptive
            && now.duration_since(last_work) >= self.reactor.settings.spin
    }

    fn sleep(&mut self, now: Instant) {
        if !self.executor.prepare_sleep() {
            return;
        }
        memory::settle();
        let timeout = self.executor.next_deadline().map(|deadline| deadline.saturating_duration_since(now));
        self.driver.wait(timeout);
        self.executor.end_sleep();
        let counters = &self.reactor.handle.shared.counters;
        let asleep = now.elapsed().as_nanos() as u64;
        counters.sleeps.fetch_add(1, Ordering::Relaxed);
        counters.idle_ns.fetch_add(asleep, Ordering::Relaxed);
    }

    fn publish(&self) {
        let counters = &self.reactor.handle.shared.counters;
        counters.loops.store(self.loops, Ordering::Relaxed);
        counters.busy.store(self.busy, Ordering::Relaxed);
        counters.tasks.store(self.executor.len() as u64, Ordering::Relaxed);
        let (enters, in_flight) = self.driver.counters();
        counters.enters.store(enters, Ordering::Relaxed);
        counters.in_flight.store(in_flight, Ordering::Relaxed);
    }
}
