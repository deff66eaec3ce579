mod frame_test;
mod identity_test;
mod load_test;
mod not_after_test;
mod rpc_test;
mod tls_test;
