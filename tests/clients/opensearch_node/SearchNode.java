import java.util.List;
import org.opensearch.common.settings.Settings;
import org.opensearch.env.Environment;
import org.opensearch.index.mapper.MapperExtrasPlugin;
import org.opensearch.node.Node;
import org.opensearch.transport.Netty4Plugin;

/** One node of OpenSearch on the loopback address: SearchNode FOLDER PORT. */
public class SearchNode extends Node {
    SearchNode(Settings settings) {
        super(new Environment(settings, null), List.of(Netty4Plugin.class, MapperExtrasPlugin.class), false);
    }

    public static void main(String[] arguments) throws Exception {
        Settings settings = Settings.builder()
            .put("path.home", arguments[0])
            .put("http.port", arguments[1])
            .put("network.host", "127.0.0.1")
            .put("transport.port", "0")
            .put("discovery.type", "single-node")
            .put("node.name", "node")
            .put("cluster.name", "test")
            // A test needs a few kilobytes, however full the disk is.
            .put("cluster.routing.allocation.disk.threshold_enabled", false)
            .build();
        new SearchNode(settings).start();
        Thread.currentThread().join();
    }
}
