//! The task of one connection.
#![forbid(unsafe_code)]

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use super::listener::Listener;
use super::service::Shared;

/// Closes the connection; what serves it comes with the queues.
pub(super) async fn serve(
    shared: Arc<Shared>,
    _listener: Arc<Listener>,
    stream: TcpStream,
    _peer: SocketAddr,
) {
    drop(stream);
    shared.connection_closed();
}
