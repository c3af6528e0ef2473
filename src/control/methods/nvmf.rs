//! Subsystems, namespaces, listeners and hosts, under SPDK's names and in SPDK's shapes.
#![forbid(unsafe_code)]

use super::bdev::{BDEV, errno};
use crate::control::Daemon;
use crate::control::changes::Leaving;
use crate::control::error::{INTERNAL_ERROR, INVALID_PARAMS, RpcError};
use crate::control::exports::{Addition, ChangeError, hex};
use crate::control::schema::{Kind, Param, Params, UNSIGNED, optional, required};
use crate::control::table::{Chapter, Method};
use crate::control::transport::TransportError;
use crate::nvme::nqn::DISCOVERY;
use crate::target::{AnaState, C2hSuccess, SubsystemKind, SubsystemSpec, SubsystemView, TargetError};
use serde_json::{Map, Value, json};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "SPDK: NVMe over Fabrics",
    preface: "A subsystem that shows volumes is kept in the catalog of their pool and comes back when the pool is \
              imported; `tgt_name`, where given, is `nvmf_tgt`.",
    methods: &[
        Method {
            name: "nvmf_get_targets",
            summary: "Lists the targets; there is one.",
            params: &[],
            result: "`[\"nvmf_tgt\"]`.",
            run: |_, _| Box::pin(async { Ok(json!([TARGET_NAME])) }),
        },
        Method {
            name: "nvmf_create_transport",
            summary: "Sets the limits of connections made from now on, and keeps them in the pools. The TCP transport is always there.",
            params: &[
                required("trtype", TRTYPE, "`TCP`."),
                TGT_NAME,
                optional("max_queue_depth", U16, "Entries of a queue, 16 to 1024."),
                optional("max_io_qpairs_per_ctrlr", U16, "I/O queues of one controller."),
                optional("in_capsule_data_size", U32, "Data that a command may carry itself, in bytes."),
                optional(
                    "max_io_size",
                    U32,
                    "The largest transfer of one command, in bytes; a power of two.",
                ),
                optional(
                    "c2h_success",
                    Kind::Bool,
                    "Whether the last data of a read may stand for its completion.",
                ),
                optional("dif_insert_or_strip", Kind::Off, "Protection information; there is none here."),
                optional("zcopy", Kind::Bool, "Accepted and ignored."),
                optional("io_unit_size", UNSIGNED, "Accepted and ignored."),
                optional("max_aq_depth", UNSIGNED, "Accepted and ignored."),
                optional("num_shared_buffers", UNSIGNED, "Accepted and ignored."),
                optional("buf_cache_size", UNSIGNED, "Accepted and ignored."),
                optional("iobuf_small_cache_size", UNSIGNED, "Accepted and ignored."),
                optional("iobuf_large_cache_size", UNSIGNED, "Accepted and ignored."),
                optional("num_cqe", UNSIGNED, "Accepted and ignored."),
                optional("max_srq_depth", UNSIGNED, "Accepted and ignored."),
                optional("no_srq", Kind::Bool, "Accepted and ignored."),
                optional("sock_priority", UNSIGNED, "Accepted and ignored."),
                optional(
                    "acceptor_backlog",
                    Kind::Signed { min: -1, max: i32::MAX as i64 },
                    "Accepted and ignored.",
                ),
                optional("acceptor_poll_rate", UNSIGNED, "Accepted and ignored."),
                optional("abort_timeout_sec", UNSIGNED, "Accepted and ignored."),
                optional("no_wr_batching", Kind::Bool, "Accepted and ignored."),
                optional("control_msg_num", UNSIGNED, "Accepted and ignored."),
                optional("disable_mappable_bar0", Kind::Bool, "Accepted and ignored."),
                optional("disable_adaptive_irq", Kind::Bool, "Accepted and ignored."),
                optional("disable_shadow_doorbells", Kind::Bool, "Accepted and ignored."),
                optional("ack_timeout", UNSIGNED, "Accepted and ignored."),
                optional("data_wr_pool_size", UNSIGNED, "Accepted and ignored."),
                optional("disable_command_passthru", Kind::Bool, "Accepted and ignored."),
                optional("kas", UNSIGNED, "Accepted and ignored."),
                optional("min_kato", UNSIGNED, "Accepted and ignored."),
            ],
            result: "`true`; a second call in one life of the daemon is refused, as SPDK refuses it.",
            run: |daemon, params| Box::pin(async move { create_transport(&daemon, &params).await }),
        },
        Method {
            name: "nvmf_get_transports",
            summary: "Shows the transport and its limits.",
            params: &[TGT_NAME, optional("trtype", TRTYPE, "Only this one.")],
            result: "a list with the TCP transport in SPDK's shape.",
            run: |daemon, _| Box::pin(async move { Ok(transports(&daemon)) }),
        },
        Method {
            name: "nvmf_create_subsystem",
            summary: "Creates a subsystem.",
            params: &[
                required("nqn", Kind::Nqn, "Its NQN."),
                TGT_NAME,
                optional(
                    "serial_number",
                    Kind::Ascii { max: 20 },
                    "Its serial number; derived from the NQN when left out.",
                ),
                optional("model_number", Kind::Ascii { max: 40 }, "Its model number."),
                optional("max_namespaces", U32, "The highest NSID; 0 means the default."),
                optional("allow_any_host", Kind::Bool, "Let any host connect; false when left out."),
                optional(
                    "ana_reporting",
                    Kind::Bool,
                    "Tell hosts how each listener reaches the namespaces (asymmetric namespace access); false when left out.",
                ),
                optional("min_cntlid", U16, "The first controller id."),
                optional("max_cntlid", U16, "The last controller id."),
                optional("max_discard_size_kib", UNSIGNED, "Accepted; the target has its own limits."),
                optional("max_write_zeroes_size_kib", UNSIGNED, "Accepted; the target has its own limits."),
                optional("dmrsl", UNSIGNED, "Accepted; the target has its own limits."),
                optional("wzsl", UNSIGNED, "Accepted; the target has its own limits."),
                optional("passthrough", Kind::Off, "Passthrough of commands; not here."),
                optional("enable_nssr", Kind::Off, "NVM subsystem reset; not here."),
                optional("admin_label", Kind::Ascii { max: 256 }, "Accepted and ignored."),
            ],
            result: "`true`.",
            run: |daemon, params| Box::pin(async move { create_subsystem(&daemon, &params).await }),
        },
        Method {
            name: "nvmf_delete_subsystem",
            summary: "Deletes a subsystem and disconnects its hosts, which are told not to come back.",
            params: &[NQN, TGT_NAME],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let changing = daemon.exports.lock().await;
                    let leaving = daemon.delete_subsystem(params.text("nqn")?).await;
                    drop(changing);
                    left(leaving).await
                })
            },
        },
        Method {
            name: "nvmf_get_subsystems",
            summary: "Lists all subsystems with discovery first, or shows one.",
            params: &[optional("nqn", Kind::Nqn, "Only this one."), TGT_NAME],
            result: "a list of subsystems in SPDK's shape.",
            run: |daemon, params| Box::pin(async move { get_subsystems(&daemon, &params) }),
        },
        Method {
            name: "nvmf_subsystem_add_ns",
            summary: "Shows a device, a volume or a snapshot (read-only) as a namespace.",
            params: &[NQN, required("namespace", Kind::Object(NAMESPACE), "The namespace."), TGT_NAME],
            result: "the NSID.",
            run: |daemon, params| Box::pin(async move { add_ns(&daemon, &params).await }),
        },
        Method {
            name: "nvmf_subsystem_remove_ns",
            summary: "Removes a namespace; commands that have started are completed first.",
            params: &[NQN, required("nsid", NSID, "Its NSID."), TGT_NAME],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let changing = daemon.exports.lock().await;
                    let leaving =
                        daemon.remove_namespace(params.text("nqn")?, nsid(&params)?.unwrap_or(0)).await;
                    drop(changing);
                    left(leaving).await
                })
            },
        },
        Method {
            name: "nvmf_subsystem_add_listener",
            summary: "Makes a subsystem reachable at an address; with the discovery NQN, discovery.",
            params: &[
                NQN,
                required("listen_address", Kind::Object(ADDRESS), "The address."),
                TGT_NAME,
                optional("secure_channel", Kind::Off, "TLS; not yet here."),
                optional(
                    "ana_state",
                    ANA_STATE,
                    "How it reaches the namespaces at first; `optimized` when left out.",
                ),
                optional("sock_impl", Kind::Text { max: 64 }, "Accepted and ignored."),
                optional("numa_id", Kind::Signed { min: -1, max: 1023 }, "Accepted and ignored."),
            ],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let address = listen_address(&params)?;
                    let state = params.text_opt("ana_state")?.and_then(AnaState::from_name);
                    let _changing = daemon.exports.lock().await;
                    done(daemon.add_listener_in(params.text("nqn")?, address, state).await)
                })
            },
        },
        Method {
            name: "nvmf_subsystem_remove_listener",
            summary: "Ends reaching a subsystem at an address; hosts that came in by it are disconnected.",
            params: &[NQN, required("listen_address", Kind::Object(ADDRESS), "The address."), TGT_NAME],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let address = listen_address(&params)?;
                    let changing = daemon.exports.lock().await;
                    let leaving = daemon.remove_listener(params.text("nqn")?, address).await;
                    drop(changing);
                    left(leaving).await
                })
            },
        },
        Method {
            name: "nvmf_subsystem_add_host",
            summary: "Allows a host to connect.",
            params: &[
                NQN,
                required("host", Kind::Nqn, "The host's NQN."),
                TGT_NAME,
                optional("psk", Kind::Unsupported, "TLS; not yet here."),
                optional("dhchap_key", Kind::Unsupported, "In-band authentication; not yet here."),
                optional("dhchap_ctrlr_key", Kind::Unsupported, "In-band authentication; not yet here."),
            ],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let _changing = daemon.exports.lock().await;
                    done(daemon.add_host(params.text("nqn")?, params.text("host")?).await)
                })
            },
        },
        Method {
            name: "nvmf_subsystem_remove_host",
            summary: "Ends a host's right to connect and disconnects it.",
            params: &[
                NQN,
                required("host", Kind::Nqn, "The host's NQN."),
                TGT_NAME,
                optional("timeout_ms", UNSIGNED, "Accepted; hosts are disconnected at once."),
            ],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let changing = daemon.exports.lock().await;
                    let leaving = daemon.remove_host(params.text("nqn")?, params.text("host")?).await;
                    drop(changing);
                    match leaving {
                        Err(ChangeError::Target(error @ TargetError::NoHost { .. })) => {
                            Err(target_error(&error).spoken_as(INTERNAL_ERROR, "Internal error"))
                        }
                        leaving => left(leaving).await,
                    }
                })
            },
        },
        Method {
            name: "nvmf_subsystem_allow_any_host",
            summary: "Lets any host connect, or only those that were added; the others are disconnected.",
            params: &[NQN, required("allow_any_host", Kind::Bool, "Whether any host may connect."), TGT_NAME],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let changing = daemon.exports.lock().await;
                    let leaving =
                        daemon.allow_any_host(params.text("nqn")?, params.bool("allow_any_host")?).await;
                    drop(changing);
                    left(leaving).await
                })
            },
        },
        Method {
            name: "nvmf_subsystem_get_listeners",
            summary: "Lists where a subsystem listens.",
            params: &[NQN, TGT_NAME],
            result: "a list of `{address}`, with `ana_states` of every ANA group where that is reported.",
            run: |daemon, params| Box::pin(async move { get_listeners(&daemon, params.text("nqn")?) }),
        },
        Method {
            name: "nvmf_subsystem_get_controllers",
            summary: "Lists the hosts that are connected.",
            params: &[NQN, TGT_NAME],
            result: "a list of `{cntlid, cntrltype, hostnqn, hostid, num_io_qpairs}`.",
            run: |daemon, params| Box::pin(async move { get_controllers(&daemon, params.text("nqn")?) }),
        },
        Method {
            name: "nvmf_subsystem_get_qpairs",
            summary: "Lists the connections of a subsystem's hosts.",
            params: &[NQN, TGT_NAME],
            result: "a list of `{cntlid, qid, state, thread, hostnqn, listen_address, peer_address}`.",
            run: |daemon, params| Box::pin(async move { get_qpairs(&daemon, params.text("nqn")?) }),
        },
    ],
};

const TARGET_NAME: &str = "nvmf_tgt";
const U16: Kind = Kind::Unsigned { min: 0, max: u16::MAX as u64 };
pub const U32: Kind = Kind::Unsigned { min: 0, max: u32::MAX as u64 };
/// How a listener may reach namespaces.
pub const ANA_STATE: Kind =
    Kind::OneOf(&["optimized", "non_optimized", "inaccessible", "persistent_loss", "change"]);
const TRTYPE: Kind = Kind::OneOf(&["TCP"]);
const NSID: Kind = Kind::Unsigned { min: 1, max: u32::MAX as u64 - 1 };
pub const NQN: Param = required("nqn", Kind::Nqn, "The subsystem's NQN.");
pub const TGT_NAME: Param = optional("tgt_name", Kind::OneOf(&[TARGET_NAME]), "The target.");
const NAMESPACE: &[Param] = &[
    required("bdev_name", BDEV, "What to show: a device, or a volume or snapshot as POOL/NAME or UUID."),
    optional("nsid", NSID, "Its NSID; the lowest free one when left out."),
    optional("nguid", Kind::Hex { digits: 32 }, "Its NGUID; made from the UUID when left out."),
    optional("eui64", Kind::Hex { digits: 16 }, "Its EUI-64; none when left out."),
    optional("uuid", Kind::Uuid, "Its UUID; the bdev's own when left out."),
    optional("anagrpid", U32, "Its ANA group, 1 to `max_namespaces`; that of its NSID when left out or 0."),
    optional("no_auto_visible", Kind::Bool, "Accepted; every allowed host sees every namespace."),
    optional("hide_metadata", Kind::Bool, "Accepted; there is no metadata."),
    optional("ptpl_file", Kind::Unsupported, "Persistent reservations; not yet here."),
];
pub const ADDRESS: &[Param] = &[
    required("trtype", TRTYPE, "`TCP`."),
    optional(
        "adrfam",
        Kind::OneOf(&["IPv4", "IPv6"]),
        "The address family; as the address is when left out.",
    ),
    required("traddr", Kind::Address, "The address; `0.0.0.0` or `::` for every address."),
    required("trsvcid", Kind::Text { max: 5 }, "The port, as text."),
];

fn done(change: Result<(), ChangeError>) -> Result<Value, RpcError> {
    change.map(|()| Value::Bool(true)).map_err(spoken)
}

/// As [`done`], once those have left who had to.
pub async fn left(leaving: Result<Leaving, ChangeError>) -> Result<Value, RpcError> {
    match leaving {
        Ok(leaving) => done(leaving.end().await),
        Err(error) => Err(spoken(error)),
    }
}

/// A refused change in SPDK's words.
pub fn spoken(error: ChangeError) -> RpcError {
    match error {
        ChangeError::Target(error) => target_error(&error).spoken_as(INVALID_PARAMS, "Invalid parameters"),
        ChangeError::Refused(error) => error,
    }
}

/// A refusal of the target with the field at fault.
pub fn target_error(error: &TargetError) -> RpcError {
    let code = match error {
        TargetError::Listen { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        error if error.is_not_found() => libc::ENODEV,
        error if error.is_conflict() => libc::EEXIST,
        _ => libc::EINVAL,
    };
    let refused = RpcError::refused(code, error.to_string());
    match error.field() {
        Some(field) => refused.with("field", field),
        None => refused,
    }
}

async fn create_transport(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let exists = || RpcError::new(INTERNAL_ERROR, "Transport type 'TCP' already exists");
    if daemon.transport_created.get() {
        return Err(exists());
    }
    let mut options = daemon.target.transport();
    let narrow = |name: &str| -> Result<Option<u32>, RpcError> {
        Ok(params.u64_opt(name)?.and_then(|value| u32::try_from(value).ok()))
    };
    if let Some(depth) = narrow("max_queue_depth")? {
        options.max_queue_depth = u16::try_from(depth).unwrap_or(u16::MAX);
    }
    if let Some(queues) = narrow("max_io_qpairs_per_ctrlr")? {
        options.max_io_queues = u16::try_from(queues).unwrap_or(u16::MAX);
    }
    if let Some(size) = narrow("in_capsule_data_size")? {
        options.in_capsule_data_size = size;
    }
    if let Some(size) = narrow("max_io_size")? {
        options.max_io_size = size;
    }
    if params.bool_opt("c2h_success")? == Some(false) {
        options.c2h_success = C2hSuccess::Off;
    }
    // Pools come and go under this lock, and each of them gets the record.
    let _alone = daemon.pool_changes.lock().await;
    if daemon.transport_created.get() {
        return Err(exists());
    }
    daemon.set_transport(options).await.map_err(|error| match error {
        TransportError::Target(error) => {
            let field = match error.field() {
                Some("max_io_queues") => "max_io_qpairs_per_ctrlr",
                Some(field) => field,
                None => "trtype",
            };
            RpcError::field(field, error.to_string())
        }
        TransportError::Record(error) => error,
    })?;
    Ok(Value::Bool(true))
}

/// Members that mean nothing here have the values SPDK gives them by default.
fn transports(daemon: &Daemon) -> Value {
    let options = daemon.target.transport();
    json!([{
        "trtype": "TCP",
        "max_queue_depth": options.max_queue_depth,
        "max_io_qpairs_per_ctrlr": options.max_io_queues,
        "in_capsule_data_size": options.in_capsule_data_size,
        "max_io_size": options.max_io_size,
        "max_aq_depth": 128,
        "iobuf_small_cache_size": u32::MAX,
        "iobuf_large_cache_size": u32::MAX,
        "dif_insert_or_strip": false,
        "zcopy": false,
        "c2h_success": options.c2h_success != C2hSuccess::Off,
        "sock_priority": 0,
        "abort_timeout_sec": 1,
        "ack_timeout": 0,
        "data_wr_pool_size": 0,
        "disable_command_passthru": false,
        "kas": 100,
        "min_kato": 10_000,
    }])
}

async fn create_subsystem(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let nqn = params.text("nqn")?;
    let mut spec = SubsystemSpec::new(nqn);
    if let Some(serial) = params.text_opt("serial_number")? {
        spec.serial_number = serial.to_owned();
    }
    if let Some(model) = params.text_opt("model_number")? {
        spec.model_number = model.to_owned();
    }
    spec.allow_any_host = params.bool_opt("allow_any_host")?.unwrap_or(false);
    spec.ana_reporting = params.bool_opt("ana_reporting")?.unwrap_or(false);
    if let Some(max) = params.u64_opt("max_namespaces")?.filter(|max| *max > 0) {
        spec.max_namespaces = u32::try_from(max).unwrap_or(u32::MAX);
    }
    let cntlid = |name: &str| -> Result<Option<u16>, RpcError> {
        Ok(params.u64_opt(name)?.and_then(|id| u16::try_from(id).ok()))
    };
    if let Some(min) = cntlid("min_cntlid")? {
        spec.min_cntlid = min;
    }
    if let Some(max) = cntlid("max_cntlid")? {
        spec.max_cntlid = max;
    }
    let _changing = daemon.exports.lock().await;
    match daemon.create_subsystem(spec) {
        Ok(()) => Ok(Value::Bool(true)),
        Err(ChangeError::Refused(error)) => Err(error),
        Err(ChangeError::Target(error)) => {
            Err(target_error(&error).spoken_as(INTERNAL_ERROR, &format!("Unable to create subsystem {nqn}")))
        }
    }
}

fn nsid(params: &Params) -> Result<Option<u32>, RpcError> {
    Ok(params.u64_opt("nsid")?.and_then(|nsid| u32::try_from(nsid).ok()))
}

/// The parameter `anagrpid`; 0 is none, as in SPDK.
pub fn group(params: &Params) -> Result<Option<u32>, RpcError> {
    Ok(params.u64_opt("anagrpid")?.and_then(|group| u32::try_from(group).ok()).filter(|group| *group > 0))
}

async fn add_ns(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let namespace = params.object("namespace")?;
    let name = namespace.text("bdev_name")?;
    let _changing = daemon.exports.lock().await;
    let found = daemon.backend(name).await.ok_or_else(|| {
        RpcError::field("namespace.bdev_name", format!("there is no bdev {name}"))
            .spoken_as(INVALID_PARAMS, "Invalid parameters")
    })?;
    let addition = Addition {
        nsid: nsid(&namespace)?,
        uuid: namespace.uuid_opt("uuid")?.or(found.uuid),
        nguid: namespace.text_opt("nguid")?.map(str::to_owned),
        eui64: namespace.text_opt("eui64")?.map(str::to_owned),
        anagrpid: group(&namespace)?,
        ..found
    };
    let nsid = daemon.add_namespace(params.text("nqn")?, addition).await.map_err(spoken)?;
    Ok(json!(nsid))
}

pub fn listen_address(params: &Params) -> Result<SocketAddr, RpcError> {
    address_in(params, "listen_address")
}

/// The address in the parameter `field`.
pub fn address_in(params: &Params, field: &str) -> Result<SocketAddr, RpcError> {
    let address = params.object(field)?;
    let ip = address.address("traddr")?;
    let family = match ip {
        IpAddr::V4(_) => "IPv4",
        IpAddr::V6(_) => "IPv6",
    };
    if address.text_opt("adrfam")?.is_some_and(|given| given != family) {
        return Err(RpcError::field(format!("{field}.adrfam"), format!("the address {ip} is {family}")));
    }
    match address.text("trsvcid")?.parse::<u16>() {
        Ok(port) if port > 0 => Ok(SocketAddr::new(ip, port)),
        _ => Err(RpcError::field(format!("{field}.trsvcid"), "must be a port from 1 to 65535, as text")),
    }
}

pub fn address(address: SocketAddr) -> Value {
    json!({
        "trtype": "TCP",
        "adrfam": if address.is_ipv4() { "IPv4" } else { "IPv6" },
        "traddr": address.ip().to_string(),
        "trsvcid": address.port().to_string(),
    })
}

fn get_subsystems(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    match params.text_opt("nqn")? {
        Some(nqn) => Ok(json!([view(&subsystem(daemon, nqn)?)])),
        // Those of transfers are for their clients alone.
        None => {
            let all = daemon.target.subsystems();
            Ok(all.iter().filter(|at| !daemon.transfers.has_door(&at.nqn)).map(view).collect())
        }
    }
}

fn subsystem(daemon: &Daemon, nqn: &str) -> Result<SubsystemView, RpcError> {
    daemon.target.subsystem(nqn).map_err(|error| errno(libc::ENODEV, error.to_string()))
}

fn view(subsystem: &SubsystemView) -> Value {
    let discovery = subsystem.kind == SubsystemKind::Discovery;
    let hosts: Vec<Value> = subsystem.hosts.iter().map(|host| json!({ "nqn": host })).collect();
    let mut object = json!({
        "nqn": subsystem.nqn,
        "subtype": if discovery { "Discovery" } else { "NVMe" },
        "listen_addresses": subsystem.listeners.iter().map(|at| address(*at)).collect::<Vec<Value>>(),
        "allow_any_host": subsystem.allow_any_host,
        "hosts": hosts,
    });
    let more = json!({
        "serial_number": subsystem.serial_number,
        "model_number": subsystem.model_number,
        "max_namespaces": subsystem.max_namespaces,
        "passthrough": false,
        "min_cntlid": subsystem.min_cntlid,
        "max_cntlid": subsystem.max_cntlid,
        "dmrsl": 0,
        "wzsl": 0,
        "namespaces": namespaces(subsystem),
    });
    if let (false, Value::Object(object), Value::Object(more)) = (discovery, &mut object, more) {
        object.extend(more);
    }
    object
}

fn namespaces(subsystem: &SubsystemView) -> Vec<Value> {
    let namespaces = subsystem.namespaces.iter().map(|namespace| {
        let mut object = Map::new();
        object.insert("nsid".to_owned(), json!(namespace.nsid));
        object.insert("bdev_name".to_owned(), json!(namespace.bdev_name));
        object.insert("name".to_owned(), json!(namespace.bdev_name));
        object.insert("nguid".to_owned(), json!(hex(&namespace.nguid)));
        if let Some(eui64) = namespace.eui64 {
            object.insert("eui64".to_owned(), json!(hex(&eui64)));
        }
        object.insert("uuid".to_owned(), json!(namespace.uuid));
        object.insert("anagrpid".to_owned(), json!(namespace.ana_group));
        Value::Object(object)
    });
    namespaces.collect()
}

fn get_listeners(daemon: &Daemon, nqn: &str) -> Result<Value, RpcError> {
    let listeners = daemon.target.listeners(nqn).map_err(|error| errno(libc::ENODEV, error.to_string()))?;
    let view = listeners.iter().map(|listener| {
        let mut object = json!({ "address": address(listener.addr) });
        if !listener.ana_states.is_empty() {
            let states = (1..).zip(&listener.ana_states);
            object["ana_states"] = states
                .map(|(group, state)| json!({ "ana_group": group, "ana_state": state.name() }))
                .collect();
        }
        object
    });
    Ok(view.collect())
}

fn get_controllers(daemon: &Rc<Daemon>, nqn: &str) -> Result<Value, RpcError> {
    let kind = if nqn == DISCOVERY { "discovery" } else { "io" };
    let controllers =
        daemon.target.controllers(nqn).map_err(|error| errno(libc::ENODEV, error.to_string()))?;
    let view = controllers.iter().map(|controller| {
        json!({
            "cntlid": controller.cntlid,
            "cntrltype": kind,
            "hostnqn": controller.hostnqn,
            "hostid": controller.hostid,
            "num_io_qpairs": controller.io_queues,
        })
    });
    Ok(view.collect())
}

fn get_qpairs(daemon: &Rc<Daemon>, nqn: &str) -> Result<Value, RpcError> {
    let queues = daemon.target.queues(nqn).map_err(|error| errno(libc::ENODEV, error.to_string()))?;
    let view = queues.iter().map(|queue| {
        json!({
            "cntlid": queue.cntlid,
            "qid": queue.qid,
            "state": "enabled",
            "thread": format!("reactor_{}", queue.reactor),
            "hostnqn": queue.hostnqn,
            "listen_address": address(queue.local),
            "peer_address": address(queue.peer),
        })
    });
    Ok(view.collect())
}
