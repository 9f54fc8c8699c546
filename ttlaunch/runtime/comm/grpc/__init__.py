"""Messages between ranks over gRPC, without MPI: `socket_type: grpc`."""
