//! What each reactor holds of the open pools: its shards, found without a lock, and its flushes, made together.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use super::sabotage::{Sabotage, is};
use super::shard::Shard;
use crate::device::{Device, IoError};
use crate::reactor::sync::Event;
use crate::reactor::{ReactorHandle, seat};

thread_local! {
    /// By seat, then by the pool's key.
    static POOLS: RefCell<Vec<Vec<Option<Rc<Local>>>>> = const { RefCell::new(Vec::new()) };
}

/// Who owns the shards of a pool; the same on every thread.
pub struct Owners {
    /// The pool's key in this process.
    pub key: usize,
    /// The reactor of each shard; `None` = whatever thread asks (tests without reactors).
    pub reactors: Vec<Option<ReactorHandle>>,
    /// The pool's devices.
    pub devices: Vec<Device>,
}

/// One pool on one reactor.
pub(super) struct Local {
    shards: RefCell<Vec<Option<Rc<Shard>>>>,
    /// Flushes asked for, started for, and done.
    asked: Cell<u64>,
    done: Cell<u64>,
    running: Cell<bool>,
    /// The flush that failed; none is tried after it.
    failed: RefCell<Option<IoError>>,
    event: Event,
}

/// Puts a shard where this reactor finds it.
pub(super) fn install(key: usize, shard: Rc<Shard>) {
    let local = POOLS.with_borrow_mut(|seats| {
        if seats.len() <= seat() {
            seats.resize(seat() + 1, Vec::new());
        }
        let pools = &mut seats[seat()];
        if pools.len() <= key {
            pools.resize(key + 1, None);
        }
        Rc::clone(pools[key].get_or_insert_with(|| {
            Rc::new(Local {
                shards: RefCell::default(),
                asked: Cell::new(0),
                done: Cell::new(0),
                running: Cell::new(false),
                failed: RefCell::new(None),
                event: Event::new(),
            })
        }))
    });
    let mut shards = local.shards.borrow_mut();
    let index = usize::from(shard.index);
    if shards.len() <= index {
        shards.resize(index + 1, None);
    }
    shards[index] = Some(shard);
}

/// Forgets a pool on this reactor.
pub(super) fn remove(key: usize) {
    POOLS.with_borrow_mut(|seats| {
        if let Some(slot) = seats.get_mut(seat()).and_then(|pools| pools.get_mut(key)) {
            *slot = None;
        }
    });
}

/// Forgets all pools on all seats of this thread, as the end of a process would.
pub(super) fn remove_all() {
    drop(POOLS.take());
}

fn local(key: usize) -> Option<Rc<Local>> {
    POOLS.with_borrow(|seats| seats.get(seat())?.get(key)?.clone())
}

/// The shard, when this reactor owns it.
pub(super) fn shard(key: usize, index: u16) -> Option<Rc<Shard>> {
    POOLS.with_borrow(|seats| {
        let local = seats.get(seat())?.get(key)?.as_ref()?;
        local.shards.borrow().get(usize::from(index))?.clone()
    })
}

impl Owners {
    /// Runs `work` with shard `index` on the reactor that owns it.
    pub async fn on<T, F, Fut>(&self, index: u16, work: F) -> Result<T, IoError>
    where
        T: Send + 'static,
        F: FnOnce(Rc<Shard>) -> Fut + Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let key = self.key;
        match &self.reactors[usize::from(index)] {
            Some(reactor) if !reactor.is_current() => reactor
                .call(move || async move {
                    match shard(key, index) {
                        Some(shard) => Ok(work(shard).await),
                        None => Err(IoError::Gone),
                    }
                })
                .await
                .map_err(|_| IoError::Gone)?,
            _ => match shard(key, index) {
                Some(shard) => Ok(work(shard).await),
                None => Err(IoError::Gone),
            },
        }
    }

    /// Runs `work` with every shard, side by side. The results are in shard order.
    pub async fn each<T, F, Fut>(&self, work: F) -> Result<Vec<T>, IoError>
    where
        T: Send + 'static,
        F: FnOnce(Rc<Shard>) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let runs = (0..self.reactors.len() as u16).map(|index| self.on(index, work.clone()));
        super::join::all(runs).await.into_iter().collect()
    }

    /// Makes every change that was acknowledged before this call durable. Calls that meet on one reactor share
    /// one flush of the devices, which goes on when its callers go away.
    pub async fn flush(self: &Arc<Owners>) -> Result<(), IoError> {
        let Some(local) = local(self.key) else { return self.flush_now().await };
        let ticket = local.asked.get() + 1;
        local.asked.set(ticket);
        if !local.running.replace(true) {
            crate::reactor::spawn(Arc::clone(self).keep_flushing(Rc::clone(&local)));
        }
        while local.done.get() < ticket {
            if let Some(error) = local.failed.borrow().clone() {
                return Err(error);
            }
            local.event.wait().await;
        }
        Ok(())
    }

    async fn keep_flushing(self: Arc<Owners>, local: Rc<Local>) {
        while local.failed.borrow().is_none() && local.done.get() < local.asked.get() {
            let covers = local.asked.get();
            match self.flush_now().await {
                Ok(()) => local.done.set(covers),
                // What a device could not flush it may report as flushed the next time: this was the last.
                Err(error) => *local.failed.borrow_mut() = Some(error),
            }
            local.event.notify();
        }
        local.running.set(false);
    }

    async fn flush_now(&self) -> Result<(), IoError> {
        let mut marks = Vec::new();
        for (index, mark) in
            self.each(|shard| async move { shard.write_journal().await }).await?.into_iter().enumerate()
        {
            if let Some(mark) = mark? {
                marks.push((index as u16, mark));
            }
        }
        if marks.is_empty() {
            return Ok(());
        }
        if !is(Sabotage::SkipFlush)
            && let Err(error) = super::shard::flush_all(&self.devices).await
        {
            self.fail("a device could not be flushed").await;
            return Err(error);
        }
        for (index, mark) in marks {
            self.on(index, move |shard| async move { shard.mark_durable(mark) }).await?;
        }
        Ok(())
    }

    /// Stops every shard: what is in memory and what is on the devices no longer fit together.
    pub async fn fail(&self, why: &'static str) {
        // A shard that is gone needs no stopping.
        let stop = move |shard: Rc<Shard>| async move {
            shard.fail(why);
        };
        let _ = self.each(stop).await;
    }
}
