//! Features of a controller: what Set Features changes and Get Features shows (Base 2.0, 5.15 and 5.27).
//!
//! Nothing here is saved; all of it ends with the controller.
#![forbid(unsafe_code)]

use super::identify::KEEP_ALIVE_GRANULARITY;
use crate::nvme::base::NSID_ALL;
use crate::nvme::command::Features as Command;
use crate::nvme::features::{AsyncEventConfiguration, NumberOfQueues, VolatileWriteCache, fid};
use crate::nvme::status::Status;

/// Length in bytes of the data of the features that have some.
const TIMESTAMP_LEN: usize = 8;
const HOST_BEHAVIOR_LEN: usize = 512;
const HOST_ID_LEN: usize = 16;

/// What Set and Get Features need to know of their controller.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    pub is_discovery: bool,
    pub has_write_cache: bool,
    pub io_queues_max: u16,
    /// I/O queues that are connected.
    pub io_queues: usize,
    pub host_id: [u8; 16],
    pub now_ms: u64,
}

/// The values that last.
#[derive(Debug, Default)]
pub struct Features {
    arbitration: u32,
    temperature_threshold: u32,
    error_recovery: u32,
    write_atomicity: u32,
    write_cache_off: bool,
    pub events: AsyncEventConfiguration,
    keep_alive_ms: u32,
    /// Milliseconds since 1970 as the host set them, and when it did.
    timestamp: Option<(u64, u64)>,
    host_behavior: Option<Box<[u8; HOST_BEHAVIOR_LEN]>>,
}

/// What came out of a Get Features.
#[derive(Debug, PartialEq, Eq)]
pub enum Value {
    Dword(u32),
    Data(Vec<u8>),
}

/// What a Set Features asks the controller to do besides.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    None,
    /// Dword 0 of the answer, and how many I/O queues there may be.
    QueuesGranted(NumberOfQueues, u16),
    KeepAlive(u32),
    /// Events that were held back may be wanted now.
    EventsConfigured,
}

impl Features {
    /// A value that was not given: Connect's.
    pub fn set_keep_alive(&mut self, ms: u32) -> u32 {
        self.keep_alive_ms = round_keep_alive(ms);
        self.keep_alive_ms
    }

    /// How much data a Set Features of this feature brings, 0 for most.
    pub fn data_len(feature: u8) -> usize {
        match feature {
            fid::TIMESTAMP => TIMESTAMP_LEN,
            fid::HOST_BEHAVIOR_SUPPORT => HOST_BEHAVIOR_LEN,
            _ => 0,
        }
    }

    pub fn set(&mut self, command: &Command, data: &[u8], context: &Context) -> Result<Effect, Status> {
        let invalid = Status::INVALID_FIELD.with_dnr();
        check_supported(command.fid, context)?;
        if command.save {
            return Err(Status::FEATURE_NOT_SAVEABLE.with_dnr());
        }
        if !matches!(command.nsid, 0 | NSID_ALL) && command.fid != fid::ERROR_RECOVERY {
            return Err(Status::FEATURE_NOT_NS_SPECIFIC.with_dnr());
        }
        let value = command.cdw11;
        match command.fid {
            fid::ARBITRATION => self.arbitration = value,
            // Power state 0 is the only one.
            fid::POWER_MANAGEMENT if value & 0x1F != 0 => return Err(invalid),
            fid::POWER_MANAGEMENT => {}
            fid::TEMPERATURE_THRESHOLD => self.temperature_threshold = value & 0xFFFF,
            fid::ERROR_RECOVERY => self.error_recovery = value,
            fid::VOLATILE_WRITE_CACHE => self.write_cache_off = !VolatileWriteCache(value).wce(),
            fid::NUMBER_OF_QUEUES => return grant_queues(NumberOfQueues(value), context),
            fid::WRITE_ATOMICITY => self.write_atomicity = value & 1,
            fid::ASYNC_EVENT_CONFIGURATION => {
                self.events = AsyncEventConfiguration(value);
                return Ok(Effect::EventsConfigured);
            }
            fid::TIMESTAMP => {
                let data = data.first_chunk::<TIMESTAMP_LEN>().ok_or(invalid)?;
                // Six bytes of milliseconds; the other two say where they come from and are ours.
                self.timestamp = Some((u64::from_le_bytes(*data) & ((1 << 48) - 1), context.now_ms));
            }
            fid::KEEP_ALIVE_TIMER => return Ok(Effect::KeepAlive(self.set_keep_alive(value))),
            fid::HOST_BEHAVIOR_SUPPORT => {
                let data = data.first_chunk::<HOST_BEHAVIOR_LEN>().ok_or(invalid)?;
                self.host_behavior = Some(Box::new(*data));
            }
            fid::IO_COMMAND_SET_PROFILE if value & 0x1FF != 0 => {
                return Err(Status::IOCS_COMBINATION_REJECTED.with_dnr());
            }
            fid::IO_COMMAND_SET_PROFILE => {}
            // Over Fabrics the Host Identifier is Connect's and cannot be set (Base 5.27.1.25).
            fid::HOST_IDENTIFIER => return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()),
            _ => return Err(invalid),
        }
        Ok(Effect::None)
    }

    pub fn get(&self, command: &Command, context: &Context) -> Result<Value, Status> {
        check_supported(command.fid, context)?;
        if command.sel != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        Ok(Value::Dword(match command.fid {
            fid::ARBITRATION => self.arbitration,
            fid::POWER_MANAGEMENT | fid::IO_COMMAND_SET_PROFILE => 0,
            fid::TEMPERATURE_THRESHOLD => self.temperature_threshold,
            fid::ERROR_RECOVERY => self.error_recovery,
            fid::VOLATILE_WRITE_CACHE => VolatileWriteCache(0).with_wce(!self.write_cache_off).0,
            fid::NUMBER_OF_QUEUES => NumberOfQueues::pairs(context.io_queues_max).0,
            fid::WRITE_ATOMICITY => self.write_atomicity,
            fid::ASYNC_EVENT_CONFIGURATION => self.events.0,
            fid::KEEP_ALIVE_TIMER => self.keep_alive_ms,
            fid::TIMESTAMP => return Ok(Value::Data(self.timestamp_data(context.now_ms))),
            fid::HOST_BEHAVIOR_SUPPORT => {
                let data =
                    self.host_behavior.as_deref().map_or_else(|| vec![0; HOST_BEHAVIOR_LEN], |d| d.to_vec());
                return Ok(Value::Data(data));
            }
            fid::HOST_IDENTIFIER => {
                // EXHID: the 128-bit form is the only one over Fabrics.
                let data: [u8; HOST_ID_LEN] = context.host_id;
                return if command.cdw11 & 1 == 1 {
                    Ok(Value::Data(data.to_vec()))
                } else {
                    Err(Status::HOST_ID_INCONSISTENT_FORMAT.with_dnr())
                };
            }
            _ => return Err(Status::INVALID_FIELD.with_dnr()),
        }))
    }

    /// The write cache is switched off: every write is to be durable.
    pub fn write_cache_is_off(&self) -> bool {
        self.write_cache_off
    }

    fn timestamp_data(&self, now_ms: u64) -> Vec<u8> {
        // Byte 6, bits 3:1: 001b = set by the host (Base figure 339). Never set: since the controller was made.
        let (ms, origin) = match self.timestamp {
            Some((set, at)) => (set + (now_ms - at.min(now_ms)), 1u64 << 1),
            None => (now_ms, 0),
        };
        (ms & ((1 << 48) - 1) | origin << 48).to_le_bytes().to_vec()
    }
}

fn check_supported(feature: u8, context: &Context) -> Result<(), Status> {
    let supported = match feature {
        fid::ASYNC_EVENT_CONFIGURATION | fid::KEEP_ALIVE_TIMER => true,
        _ if context.is_discovery => false,
        fid::VOLATILE_WRITE_CACHE => context.has_write_cache,
        _ => true,
    };
    if supported { Ok(()) } else { Err(Status::INVALID_FIELD.with_dnr()) }
}

fn grant_queues(asked: NumberOfQueues, context: &Context) -> Result<Effect, Status> {
    // FFFFh would be 65536 queues, which cannot be (Base 5.27.1.5).
    if asked.submission() == 0xFFFF || asked.completion() == 0xFFFF {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    if context.io_queues > 0 {
        return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr());
    }
    let granted = (asked.submission().min(asked.completion()) as u16 + 1).min(context.io_queues_max);
    Ok(Effect::QueuesGranted(NumberOfQueues::pairs(granted), granted))
}

/// Rounded up to what the controller can tell apart (Base 3.9).
fn round_keep_alive(ms: u32) -> u32 {
    let unit = u32::from(KEEP_ALIVE_GRANULARITY) * 100;
    ms.checked_next_multiple_of(unit).unwrap_or(u32::MAX / unit * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: Context = Context {
        is_discovery: false,
        has_write_cache: true,
        io_queues_max: 8,
        io_queues: 0,
        host_id: [7; 16],
        now_ms: 1000,
    };

    fn set(features: &mut Features, fid: u8, value: u32, context: &Context) -> Result<Effect, Status> {
        features.set(&Command { fid, cdw11: value, ..Command::default() }, &[], context)
    }

    fn get(features: &Features, fid: u8, context: &Context) -> Result<Value, Status> {
        features.get(&Command { fid, ..Command::default() }, context)
    }

    #[test]
    fn queues_are_granted_up_to_the_limit_and_only_before_there_are_any() {
        let mut features = Features::default();
        let granted = |n| Ok(Effect::QueuesGranted(NumberOfQueues::pairs(n), n));
        assert_eq!(set(&mut features, fid::NUMBER_OF_QUEUES, 0, &CONTEXT), granted(1));
        assert_eq!(set(&mut features, fid::NUMBER_OF_QUEUES, 0x0002_0003, &CONTEXT), granted(3));
        assert_eq!(set(&mut features, fid::NUMBER_OF_QUEUES, 0xFFFE_FFFE, &CONTEXT), granted(8));
        for wrong in [0xFFFF_0000, 0x0000_FFFF] {
            let outcome = set(&mut features, fid::NUMBER_OF_QUEUES, wrong, &CONTEXT);
            assert_eq!(outcome, Err(Status::INVALID_FIELD.with_dnr()));
        }
        let connected = Context { io_queues: 1, ..CONTEXT };
        let outcome = set(&mut features, fid::NUMBER_OF_QUEUES, 0, &connected);
        assert_eq!(outcome, Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()));
    }

    #[test]
    fn the_keep_alive_timer_is_rounded_up_and_never_overflows() {
        let mut features = Features::default();
        for (asked, given) in [(0, 0), (1, 100), (100, 100), (4999, 5000), (u32::MAX, 4_294_967_200)] {
            assert_eq!(
                set(&mut features, fid::KEEP_ALIVE_TIMER, asked, &CONTEXT),
                Ok(Effect::KeepAlive(given))
            );
            assert_eq!(get(&features, fid::KEEP_ALIVE_TIMER, &CONTEXT), Ok(Value::Dword(given)));
        }
    }

    #[test]
    fn a_discovery_controller_has_two_features_and_no_cache_means_no_feature() {
        let discovery = Context { is_discovery: true, ..CONTEXT };
        let features = Features::default();
        for feature in 0..=255 {
            let ok = get(&features, feature, &discovery).is_ok();
            assert_eq!(
                ok,
                matches!(feature, fid::ASYNC_EVENT_CONFIGURATION | fid::KEEP_ALIVE_TIMER),
                "{feature:#x}"
            );
        }
        let uncached = Context { has_write_cache: false, ..CONTEXT };
        let outcome = set(&mut Features::default(), fid::VOLATILE_WRITE_CACHE, 1, &uncached);
        assert_eq!(outcome, Err(Status::INVALID_FIELD.with_dnr()));
        assert_eq!(get(&features, fid::VOLATILE_WRITE_CACHE, &CONTEXT), Ok(Value::Dword(1)));
    }

    #[test]
    fn the_timestamp_goes_on_from_what_was_set() {
        let mut features = Features::default();
        let command = Command { fid: fid::TIMESTAMP, ..Command::default() };
        let ms: u64 = 0x0123_4567_89AB;
        features.set(&command, &ms.to_le_bytes(), &CONTEXT).unwrap();
        let later = Context { now_ms: CONTEXT.now_ms + 5, ..CONTEXT };
        let Ok(Value::Data(data)) = features.get(&command, &later) else { panic!("a timestamp has data") };
        assert_eq!(u64::from_le_bytes(data.try_into().unwrap()), (ms + 5) | 2 << 48);
        let short = features.set(&command, &[0; 7], &CONTEXT);
        assert_eq!(short, Err(Status::INVALID_FIELD.with_dnr()));
    }

    #[test]
    fn the_host_identifier_is_connects_and_what_is_not_saveable_is_not_saved() {
        let mut features = Features::default();
        let outcome = set(&mut features, fid::HOST_IDENTIFIER, 1, &CONTEXT);
        assert_eq!(outcome, Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()));
        let command = Command { fid: fid::HOST_IDENTIFIER, cdw11: 1, ..Command::default() };
        assert_eq!(features.get(&command, &CONTEXT), Ok(Value::Data(vec![7; 16])));
        let save = Command { fid: fid::ARBITRATION, save: true, ..Command::default() };
        assert_eq!(features.set(&save, &[], &CONTEXT), Err(Status::FEATURE_NOT_SAVEABLE.with_dnr()));
        let namespace = Command { fid: fid::ARBITRATION, nsid: 1, ..Command::default() };
        assert_eq!(features.set(&namespace, &[], &CONTEXT), Err(Status::FEATURE_NOT_NS_SPECIFIC.with_dnr()));
    }
}
