//! The handshakes and the admin commands against a controller that answers as each test tells it.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::{Future, ready};
use std::time::Duration;

use super::*;
use crate::host::blocking::now;
use crate::nvme::Status;
use crate::nvme::base::{OPCODE_FABRICS, admin};
use crate::nvme::command::{Features, GetLogPage, Identify};
use crate::nvme::fabrics::fctype;
use crate::nvme::features::NumberOfQueues;
use crate::nvme::identify::{NamespaceList, cns};
use crate::nvme::log::{DiscoveryLogEntry, DiscoveryLogHeader};

/// What the controller of this thread is like. Each test has its own thread.
struct Script {
    csts: Csts,
    cap: Cap,
    connect_cntlid: u16,
    connect_status: Status,
    identify: IdentifyController,
    queues_granted: u16,
    namespaces: Vec<u32>,
    /// The generation of the discovery log grows with each read of its header, so many times.
    discovery_changes: u64,
    discovery_records: u64,
    /// Every Connect that came: (QID, entries).
    connects: Vec<(u16, u16)>,
    /// Every Get Log Page that came.
    logs: Vec<GetLogPage>,
    /// The in-capsule limit that was set on I/O queues.
    in_capsule_bytes: Vec<u32>,
    paused_ms: u64,
    properties: HashMap<u32, u64>,
}

thread_local! {
    static SCRIPT: RefCell<Script> = RefCell::new(Script::new());
}

impl Script {
    fn new() -> Script {
        let mut identify = IdentifyController::new_zeroed();
        identify.cntlid = 5.into();
        identify.ioccsz = 260.into();
        Script {
            csts: Csts(0).with_rdy(true),
            cap: Cap(0).with_mqes(127).with_to(2),
            connect_cntlid: 5,
            connect_status: Status::SUCCESS,
            identify,
            queues_granted: 4,
            namespaces: vec![1, 7],
            discovery_changes: 0,
            discovery_records: 2,
            connects: Vec::new(),
            logs: Vec::new(),
            in_capsule_bytes: Vec::new(),
            paused_ms: 0,
            properties: HashMap::new(),
        }
    }

    fn answer(&mut self, sqe: &Sqe, buf: &mut [u8]) -> Cqe {
        let done = Cqe::new(sqe.cid.get(), Status::SUCCESS);
        match (sqe.opcode, sqe.fctype()) {
            (OPCODE_FABRICS, fctype::CONNECT) => {
                let command = ConnectCommand::from_sqe(sqe);
                self.connects.push((command.qid.get(), command.sqsize.get() + 1));
                let refusal = u64::from(ConnectRefusal::SUBNQN.0);
                match self.connect_status.is_success() {
                    true => done.with_result(self.connect_cntlid.into()),
                    false => Cqe::new(0, self.connect_status).with_result(refusal),
                }
            }
            (OPCODE_FABRICS, fctype::PROPERTY_GET) => {
                done.with_result(match PropertyCommand::from_sqe(sqe).ofst.get() {
                    property::CAP => self.cap.0,
                    property::CSTS => self.csts.0.into(),
                    _ => 0,
                })
            }
            (OPCODE_FABRICS, fctype::PROPERTY_SET) => {
                let command = PropertyCommand::from_sqe(sqe);
                self.properties.insert(command.ofst.get(), command.value.get());
                done
            }
            (admin::IDENTIFY, _) => {
                let identify = Identify::parse(sqe);
                match identify.cns {
                    cns::CONTROLLER => buf.copy_from_slice(self.identify.as_bytes()),
                    cns::ACTIVE_NAMESPACES => {
                        let mut page = NamespaceList::new_zeroed();
                        let after = self.namespaces.iter().filter(|&&nsid| nsid > identify.nsid || nsid == 0);
                        for (slot, &nsid) in page.nsids.iter_mut().zip(after) {
                            *slot = nsid.into();
                        }
                        buf.copy_from_slice(page.as_bytes());
                    }
                    _ => return Cqe::new(0, Status::INVALID_FIELD),
                }
                done
            }
            (admin::SET_FEATURES, _) => {
                assert_eq!(Features::parse(sqe).fid, crate::nvme::features::fid::NUMBER_OF_QUEUES);
                done.with_result(NumberOfQueues::pairs(self.queues_granted).0.into())
            }
            (admin::GET_LOG_PAGE, _) => {
                let command = GetLogPage::parse(sqe);
                self.logs.push(command);
                if command.lpo == 0 && buf.len() == size_of::<DiscoveryLogHeader>() {
                    let mut header = DiscoveryLogHeader::new_zeroed();
                    header.genctr = (100 - self.discovery_changes).into();
                    self.discovery_changes = self.discovery_changes.saturating_sub(1);
                    header.numrec = self.discovery_records.into();
                    buf.copy_from_slice(header.as_bytes());
                } else {
                    buf.fill(command.lpo as u8);
                }
                done
            }
            _ => Cqe::new(0, Status::INVALID_OPCODE.with_dnr()),
        }
    }
}

struct Mock;

impl CommandQueue for Mock {
    type In = Vec<u8>;
    type Out = Vec<u8>;

    fn open(_: SocketAddr, _: ConnectionOptions) -> impl Future<Output = Result<Mock, HostError>> {
        ready(Ok(Mock))
    }

    fn execute(
        &self,
        sqe: Sqe,
        mut data: Data<Vec<u8>, Vec<u8>>,
    ) -> impl Future<Output = (Result<Cqe, HostError>, Data<Vec<u8>, Vec<u8>>)> {
        let buf = match &mut data {
            Data::In(buf) => &mut buf[..],
            _ => &mut [],
        };
        let cqe = SCRIPT.with_borrow_mut(|script| script.answer(&sqe, buf));
        ready((Ok(cqe), data))
    }

    fn set_in_capsule_bytes(&self, bytes: u32) {
        SCRIPT.with_borrow_mut(|script| script.in_capsule_bytes.push(bytes));
    }

    fn in_buffer(len: usize) -> Vec<u8> {
        vec![0; len]
    }

    fn out_buffer(content: &[u8]) -> Vec<u8> {
        content.to_vec()
    }

    fn pause(time: Duration) -> impl Future<Output = ()> {
        SCRIPT.with_borrow_mut(|script| script.paused_ms += time.as_millis() as u64);
        ready(())
    }
}

fn connect_with(
    change: impl FnOnce(&mut Script),
    options: &ControllerOptions,
) -> Result<Controller<Mock>, HostError> {
    SCRIPT.with_borrow_mut(|script| {
        *script = Script::new();
        change(script);
    });
    now(Controller::connect(SocketAddr::from(([127, 0, 0, 1], 1)), "nqn.2024-01.a:b", options))
}

fn connect(change: impl FnOnce(&mut Script)) -> Result<Controller<Mock>, HostError> {
    connect_with(change, &ControllerOptions::new(uuid::Uuid::nil()))
}

#[test]
fn queues_and_depth_are_what_the_controller_allows() {
    let options = ControllerOptions { queues: 9, depth: 1000, ..ControllerOptions::new(uuid::Uuid::nil()) };
    let controller = connect_with(|_| {}, &options).unwrap();
    assert_eq!((controller.queue_count(), controller.depth(), controller.cntlid()), (4, 127, 5));
    SCRIPT.with_borrow(|script| {
        assert_eq!(script.connects, [(0, 32), (1, 128), (2, 128), (3, 128), (4, 128)]);
        assert_eq!(script.in_capsule_bytes, [4096; 4]);
        assert_eq!(script.properties[&property::CC], u64::from(Cc::ENABLE.0));
    });
    let modest = ControllerOptions { queues: 2, depth: 8, ..options };
    let controller = connect_with(|_| {}, &modest).unwrap();
    assert_eq!((controller.queue_count(), controller.depth()), (2, 8));
}

#[test]
fn a_controller_that_is_not_well_is_reported() {
    let slow = connect(|script| script.csts = Csts(0)).err().unwrap();
    assert!(matches!(slow, HostError::NotReady { wanted: "ready", ms: 1000 }), "{slow}");
    assert_eq!(SCRIPT.with_borrow(|script| script.paused_ms), 1000, "CAP.TO of 2 is one second");
    let fatal = connect(|script| script.csts = Csts(0).with_cfs(true)).err().unwrap();
    assert!(matches!(fatal, HostError::Fatal));
    let liar = connect(|script| script.connect_cntlid = 6).err().unwrap();
    assert!(matches!(liar, HostError::Nonsense { .. }), "{liar}");
    let refused = connect(|script| script.connect_status = ConnectRefusal::STATUS).err().unwrap();
    assert!(refused.to_string().ends_with("parameter at byte 256 of the Connect data"), "{refused}");
}

#[test]
fn hostile_limits_are_brought_into_range() {
    let controller = connect(|script| {
        script.cap = Cap(u64::MAX);
        script.identify.mdts = 255;
        script.identify.ioccsz = u32::MAX.into();
        script.queues_granted = 65535;
    })
    .unwrap();
    assert_eq!(controller.transfer_bytes_max(), 1 << 20);
    assert_eq!((controller.queue_count(), controller.depth()), (1, 127));
    let tiny = connect(|script| script.cap = Cap(0)).unwrap();
    assert_eq!(tiny.depth(), 1);
}

#[test]
fn namespace_lists_span_pages_and_must_rise() {
    let many: Vec<u32> = (1..=2500).map(|n| n * 3).collect();
    let controller = connect(|script| script.namespaces = many.clone()).unwrap();
    assert_eq!(now(controller.active_namespaces()).unwrap(), many);
    for list in [vec![1, 1], vec![2, 1]] {
        SCRIPT.with_borrow_mut(|script| script.namespaces = list);
        let error = now(controller.active_namespaces()).unwrap_err();
        assert!(matches!(error, HostError::Nonsense { .. }), "{error}");
    }
    SCRIPT.with_borrow_mut(|script| script.namespaces = (1..=100_000).collect());
    assert!(matches!(now(controller.active_namespaces()), Err(HostError::Nonsense { .. })));
}

#[test]
fn only_the_last_piece_of_a_log_may_clear_its_event() {
    let controller = connect(|_| {}).unwrap();
    let log = now(controller.log_page(0x0C, 0, 0, 10_000, false)).unwrap();
    assert_eq!((log.len(), log[0], log[4096], log[8192]), (10_000, 0, 0, 0), "offsets are multiples of 256");
    SCRIPT.with_borrow(|script| {
        let seen: Vec<_> = script.logs.iter().map(|log| (log.lpo, log.dwords, log.rae)).collect();
        assert_eq!(seen, [(0, 1024, true), (4096, 1024, true), (8192, 452, false)]);
    });
    assert!(matches!(now(controller.log_page(0x0C, 0, 0, 3, false)), Err(HostError::Invalid { .. })));
}

#[test]
fn a_discovery_log_that_changes_is_read_again() {
    let controller = connect(|script| script.discovery_changes = 3).unwrap();
    let (generation, entries) = now(controller.discovery_log()).unwrap();
    assert_eq!((generation, entries.len()), (100, 2));
    assert_eq!(size_of_val(&entries[..]), 2 * size_of::<DiscoveryLogEntry>());
    SCRIPT.with_borrow_mut(|script| script.discovery_changes = 90);
    assert!(matches!(now(controller.discovery_log()), Err(HostError::LogChanging)));
    SCRIPT.with_borrow_mut(|script| (script.discovery_changes, script.discovery_records) = (0, u64::MAX));
    assert!(matches!(now(controller.discovery_log()), Err(HostError::Nonsense { .. })));
}

#[test]
fn io_needs_a_queue_and_whole_blocks() {
    let options = ControllerOptions { queues: 0, ..ControllerOptions::new(uuid::Uuid::nil()) };
    let controller = connect_with(|_| {}, &options).unwrap();
    let ns = crate::host::Namespace {
        nsid: 1,
        blocks: 10,
        block_bytes: 512,
        used_blocks: 0,
        is_thin: false,
        is_read_only: false,
        uuid: None,
        nguid: [0; 16],
    };
    let (result, buf) = now(controller.read(&ns, 0, vec![3; 512]));
    assert!(matches!(result, Err(HostError::Invalid { .. })));
    assert_eq!(buf, [3; 512], "the buffer comes back");
    let error = now(controller.write(&ns, 0, vec![0; 511], false)).unwrap_err();
    assert!(error.to_string().contains("whole number"), "{error}");
    assert!(now(controller.write_zeroes(&ns, 0, 65537, false)).is_err());
    assert!(now(controller.deallocate(&ns, &[])).is_err());
    assert!(now(controller.deallocate(&ns, &[(0, 1); 257])).is_err());
}
